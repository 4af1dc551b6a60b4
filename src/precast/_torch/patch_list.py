"""The list of everything that precast patches in PyTorch, with the reasons.

Invariant: `patches.replace_names` replaces the names listed here, and no others. When a patch begins and ends is said
where it is made. All were tested with PyTorch 2.11 to 2.15, unless a comment names versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["LASTING", "PATCHES", "WRITING_COLLECTIVES"]

WRITING_COLLECTIVES: Final = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
_CUSTOM_FUNCTIONS: Final = ("custom_bwd", "custom_fwd")
_CLIPPING: Final = ("clip_grad_norm_", "clip_grad_value_")

LASTING: Final[Mapping[str, tuple[str, ...]]] = {
    # A compiled graph contains PyTorch's regions only; one that names a policy is entered as a region of precast's.
    # 2.11 has no such class, and there torch.autocast itself is patched.
    "torch.amp.autocast_mode:_UnmanagedAutocast": ("__enter__", "__exit__"),
    # An error in a compiled graph leaves its regions open, as a graph has no `finally`. Backends are the user's, and
    # there is no public hook around the graphs that they return.
    "torch._dynamo.output_graph:OutputGraph": ("call_user_compiler",),
    # A float32 average of bfloat16 weights: functions for lists of tensors refuse two dtypes, and there is no public
    # way to set the values from which an average is updated.
    "torch.optim.swa_utils:AveragedModel": ("update_parameters",),
    # A function must not use a rounded weight as if it were in float32. PyTorch calls `__torch_function__` neither for
    # scripted functions nor where a transform of torch.func wraps its arguments.
    "torch.jit:ScriptFunction": ("__call__",),
    "torch._functorch.vmap": ("_add_batch_dim",),
    "torch._functorch.eager_transforms": ("_wrap_for_grad",),
}
"""The patches that last until the process ends, because graphs and stored weights may be used at any time: names by
their module or class, in the notation of `pkgutil.resolve_name`."""

PATCHES: Final[Mapping[str, tuple[str, ...]]] = {
    **LASTING,
    "torch": (
        # A program that clears PyTorch's weight cache also means precast's, and there is no public event for it.
        "clear_autocast_cache",
        # A trace reports the region of each operation. A dispatch mode runs with all autocast keys excluded, so
        # PyTorch's own flags are off there.
        *("autocast_decrement_nesting", "autocast_increment_nesting", "set_autocast_enabled"),
        # A trial keeps files that the program writes in a temporary folder, and PyTorch opens paths in C++. The spread
        # of a loss over seeds needs other seeds than those that the program sets.
        *("load", "manual_seed", "save"),
        "GradScaler",  # as the names of torch.amp below
    ),
    "torch.random": ("manual_seed",),
    # Code that is imported later and uses PyTorch's name gets precast's scaler or decorator.
    # A report counts the steps that PyTorch's own scaler skipped; the scaler has no hooks.
    "torch.amp": ("GradScaler", *_CUSTOM_FUNCTIONS),
    "torch.amp.grad_scaler": ("GradScaler",),
    "torch.amp.autocast_mode": _CUSTOM_FUNCTIONS,
    "torch.cuda.amp": ("GradScaler", *_CUSTOM_FUNCTIONS),
    "torch.cuda.amp.grad_scaler": ("GradScaler",),
    "torch.cuda.amp.autocast_mode": _CUSTOM_FUNCTIONS,
    "torch.cpu.amp": ("GradScaler",),
    "torch.cpu.amp.grad_scaler": ("GradScaler",),
    # A trial compares a program that has a scaler with the same without one.
    "torch.amp:GradScaler": ("__init__", "scale", "step", "unscale_", "update"),
    # TorchScript's optimiser applies PyTorch's policy only, so it is disabled in PyTorch's regions with another one. A
    # report names the policy with which a failed operation would have succeeded. A trial disables regions.
    "torch:autocast": ("__enter__", "__exit__"),
    # The compiler's cache on disk must distinguish policies; a plain tag would hide the user's own.
    "torch.compiler.config": ("cache_key_tag",),
    # PyTorch records the backward pass of a compiled function in the regions around its forward: float32 parts are
    # differentiated in 16 bits (2.13).
    "torch._functorch.config": ("backward_pass_autocast",),
    # A checkpoint restores PyTorch's flags when it reruns a function, but no policy; there is no public event for the
    # rerun, because `context_fn` belongs to the caller. The second name exists since 2.14, and the first calls it.
    "torch.utils.checkpoint": (
        "_checkpoint_without_reentrant_generator",
        "_checkpoint_without_reentrant_generator_impl",
    ),
    "torch.utils.checkpoint:CheckpointFunction": ("forward",),
    # A custom autograd function gets the float32 casts of 16-bit weights; no function mode sees its `apply`, which
    # calls this function with its arguments.
    "torch._functorch.utils": ("unwrap_dead_wrappers",),
    # Models are detected when they are called. Public hooks for all modules take every call off its fast path, and a
    # model from torch.compile warns about them.
    "torch.nn:Module": ("__call__",),
    # Writes by collectives move no version counter, and there is no public event for them. All of torch.distributed
    # calls these methods, also functions imported earlier; DDP's own calls do not pass here.
    "torch.distributed:ProcessGroup": WRITING_COLLECTIVES,
    # A report needs the losses, where backward passes begin: autograd hooks see nodes and gradients, but not the
    # tensor. Tensor.backward looks this function up here. A trial in float16 multiplies the loss here.
    "torch.autograd": ("backward",),
    # A trial tries whether mixed precision is faster with larger batches.
    "torch.utils.data:DataLoader": ("__init__",),
    # A report names the line that clips gradients before they are unscaled; there is no hook for clipping.
    "torch.nn.utils": _CLIPPING,
    "torch.nn.utils.clip_grad": _CLIPPING,
    # Some operations refuse mixed dtypes on real tensors and accept them on fake ones, or return another dtype there.
    # An export records the results of fake tensors.
    "torch._subclasses.fake_tensor:FakeTensorMode": ("dispatch",),
    # `torch.export` never records the fused kernels for attention, except with strict=True. PyTorch's own switch is for
    # all threads.
    "torch.backends.mha": ("get_fastpath_enabled",),
    # AOTInductor sums in another order than PyTorch's kernels. It has no option to use these for single operations.
    "torch._inductor.compile_fx": ("select_decomp_table",),
    "torch._inductor.graph": ("fallback_node_due_to_unsupported_type", "fallback_handler"),
}
"""All patches of precast's, in the same notation."""
