"""The list of everything that precast patches in PyTorch: names, reason, lifetime, and tested versions.

Invariants:

- `patches.py` replaces the names listed here, and no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["PATCHES", "WITH_THE_PROCESS", "WRITING_COLLECTIVES", "Patch"]

WITH_THE_PROCESS: Final = "with the process"
"""Prefix of `Patch.ends` for a patch that lasts until the process ends."""

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
_OF_TRIALS: Final = "precast try, in the processes of its trials", "when the process ends"
_OF_CUSTOM_FUNCTIONS: Final = ("custom_bwd", "custom_fwd")


@dataclass(frozen=True)
class Patch:
    """Names of one module or class of PyTorch that have other values while the patch lasts."""

    owner: str
    """The module or class, in the notation of `pkgutil.resolve_name`: a module, or "module:class"."""
    names: tuple[str, ...]
    reason: str
    begins: str
    """The feature that first makes the patch."""
    ends: str
    versions: str = "2.11 to 2.15"
    """The versions of PyTorch with which it was tested, and the differences between them."""


_INSTALLED: Final = "precast.install()", "when the last installation ends"

PATCHES: Final = (
    Patch(
        "torch",
        ("clear_autocast_cache",),
        "A program that clears PyTorch's weight cache also means precast's, and there is no public event for it.",
        "when a policy's kernels are registered, for the first region or installation",
        "when they are taken off, with the last installation",
    ),
    Patch(
        "torch.compiler.config",
        ("cache_key_tag",),
        "The compiler's cache on disk must distinguish policies; a plain tag would hide the user's own.",
        "when the kernels of a policy unlike PyTorch's are registered",
        "when they are taken off, with the last installation",
    ),
    Patch(
        "torch._functorch.config",
        ("backward_pass_autocast",),
        "PyTorch records the backward pass of a compiled function in the regions around its forward: float32 parts are "
        "differentiated in 16 bits. A setting by the user is for the whole process, and has priority.",
        "when a policy's kernels are registered, for the first region or installation",
        "when they are taken off, with the last installation",
        "2.13",
    ),
    Patch(
        "torch.utils.checkpoint",
        (
            "_checkpoint_without_reentrant_generator",
            "_checkpoint_without_reentrant_generator_impl",
        ),
        "A checkpoint restores PyTorch's flags when it reruns a function, but no policy; there is no public event for "
        "the rerun, because `context_fn` belongs to the caller.",
        "when the first region is opened, or the first module with a rule is called",
        "when the kernels are taken off, with the last installation",
        "2.11 to 2.15; the second name exists since 2.14, and the first calls it",
    ),
    Patch(
        "torch.utils.checkpoint:CheckpointFunction",
        ("forward",),
        "The same for reentrant checkpoints, which have no `context_fn`.",
        "with the one above",
        "with the one above",
    ),
    Patch(
        "torch._functorch.utils",
        ("unwrap_dead_wrappers",),
        "A custom autograd function gets the float32 casts of 16-bit weights; no function mode sees its `apply`, which "
        "calls this function with its arguments.",
        "when a module whose rule asks for such casts is first called",
        "when the kernels are taken off, with the last installation",
    ),
    Patch(
        "torch.amp.autocast_mode:_UnmanagedAutocast",
        ("__enter__", "__exit__"),
        "A compiled graph contains PyTorch's regions only; one that names a policy is entered as a region of "
        "precast's.",
        "when torch.compile first traces a region of precast",
        f"{WITH_THE_PROCESS}: a compiled graph may run at any time",
        "2.11 to 2.15; 2.11 has no such class, and torch.autocast itself is patched",
    ),
    Patch(
        "torch._dynamo.output_graph:OutputGraph",
        ("call_user_compiler",),
        "An error in a compiled graph leaves its regions open, as a graph has no `finally`. Backends are the user's, "
        "and there is no public hook around the graphs that they return.",
        "when torch.compile first traces a region of precast",
        f"{WITH_THE_PROCESS}: a compiled graph may run at any time",
        "2.13",
    ),
    Patch(
        "torch:autocast",
        ("__enter__", "__exit__"),
        "TorchScript's optimiser applies PyTorch's policy only, so it is disabled in PyTorch's regions with another "
        "one. A report names the policy with which a failed operation of a region would have succeeded. A trial runs "
        "the program with its regions disabled.",
        "precast.install() of a policy unlike PyTorch's; precast run with PyTorch's; precast try",
        f"{_INSTALLED[1]}, or when the program does",
    ),
    *(
        Patch(
            owner,
            names,
            "Code that is imported later and uses PyTorch's name gets precast's scaler or decorator.",
            *_INSTALLED,
        )
        for owner, names in (
            ("torch", ("GradScaler",)),
            ("torch.amp", ("GradScaler", *_OF_CUSTOM_FUNCTIONS)),
            ("torch.amp.grad_scaler", ("GradScaler",)),
            ("torch.amp.autocast_mode", _OF_CUSTOM_FUNCTIONS),
            ("torch.cuda.amp", ("GradScaler", *_OF_CUSTOM_FUNCTIONS)),
            ("torch.cuda.amp.grad_scaler", ("GradScaler",)),
            ("torch.cuda.amp.autocast_mode", _OF_CUSTOM_FUNCTIONS),
            ("torch.cpu.amp", ("GradScaler",)),
            ("torch.cpu.amp.grad_scaler", ("GradScaler",)),
        )
    ),
    Patch(
        "torch.nn:Module",
        ("__call__",),
        "Models are detected when they are called. Public hooks for all modules take every call off its fast path, and "
        "a model from torch.compile warns about them.",
        "precast.install() of a policy with rules for modules; precast run",
        "when the last of those ends",
    ),
    Patch(
        "torch.distributed:ProcessGroup",
        WRITING_COLLECTIVES,
        "Writes by collectives move no version counter, and there is no public event for them. All of "
        "torch.distributed calls these methods, also functions imported earlier; DDP's own calls do not pass here.",
        "precast.attach() with held weights",
        "when the last attachment ends",
    ),
    Patch(
        "torch",
        ("autocast_decrement_nesting", "autocast_increment_nesting", "set_autocast_enabled"),
        "A trace reports the region of each operation. A dispatch mode runs with all autocast keys excluded, so "
        "PyTorch's own flags are off there.",
        "the first precast.trace() that opens",
        "the last one that closes",
    ),
    Patch(
        "torch.autograd",
        ("backward",),
        "A report needs the losses, where backward passes begin: autograd hooks see nodes and gradients, "
        "but not the tensor. Tensor.backward looks this function up here. A trial in float16 multiplies the loss here.",
        "precast run; precast try",
        "when the program ends, or its report is complete",
    ),
    Patch(
        "torch",
        ("load", "manual_seed", "save"),
        "A trial keeps files that the program writes in a temporary folder, and PyTorch opens paths in C++. The spread "
        "of a loss over seeds needs other seeds than those that the program sets.",
        *_OF_TRIALS,
    ),
    Patch(
        "torch.random",
        ("manual_seed",),
        "The same for the other name of this function.",
        *_OF_TRIALS,
    ),
    Patch(
        "torch.amp:GradScaler",
        ("scale", "step", "unscale_", "update"),
        "A report counts the steps that PyTorch's own scaler skipped; the scaler has no hooks.",
        "precast run",
        "when the program ends, or its report is complete",
    ),
    Patch(
        "torch.amp:GradScaler",
        ("__init__",),
        "A trial compares a program that has a scaler with the same without one.",
        *_OF_TRIALS,
    ),
    Patch(
        "torch.utils.data:DataLoader",
        ("__init__",),
        "A trial tries whether mixed precision is faster with larger batches.",
        *_OF_TRIALS,
    ),
    *(
        Patch(
            owner,
            ("clip_grad_norm_", "clip_grad_value_"),
            "A report names the line that clips gradients before they are unscaled; there is no hook for clipping.",
            "precast run",
            "when the program ends, or its report is complete",
        )
        for owner in ("torch.nn.utils", "torch.nn.utils.clip_grad")
    ),
    Patch(
        "torch.optim.swa_utils:AveragedModel",
        ("update_parameters",),
        "A float32 average of bfloat16 weights: PyTorch's functions for lists of tensors refuse two dtypes, and there "
        "is no public way to set the values from which an average is updated.",
        "precast.optim.bfloat16_weights",
        f"{WITH_THE_PROCESS}: the weights stay in bfloat16, and averages of them in float32",
        "2.13",
    ),
    *(
        Patch(
            owner,
            (name,),
            "A function must not use a rounded weight as if it were in float32. PyTorch calls `__torch_function__` "
            "neither for scripted functions nor where a transform of torch.func wraps its arguments.",
            "when a weight is stored in 16 bits, by precast.convert() or precast.load_converted()",
            f"{WITH_THE_PROCESS}: a stored weight may be passed at any time",
            "2.13",
        )
        for owner, name in (
            ("torch.jit:ScriptFunction", "__call__"),
            ("torch._functorch.vmap", "_add_batch_dim"),
            ("torch._functorch.eager_transforms", "_wrap_for_grad"),
        )
    ),
    Patch(
        "torch._subclasses.fake_tensor:FakeTensorMode",
        ("dispatch",),
        "Some operations refuse mixed dtypes on real tensors and accept them on fake ones, or return another dtype "
        "there. An export records the results of fake tensors.",
        "precast.export()",
        "when the model is recorded",
        "2.13",
    ),
    *(
        Patch(
            owner,
            names,
            "AOTInductor sums in another order than PyTorch's kernels, so its package would differ from the "
            "program. It has no option to use these kernels for single operations.",
            "precast export --to aoti",
            "when the package is compiled",
            "2.13",
        )
        for owner, names in (
            ("torch._inductor.compile_fx", ("select_decomp_table",)),
            (
                "torch._inductor.graph",
                ("fallback_node_due_to_unsupported_type", "fallback_handler"),
            ),
        )
    ),
)
"""All patches of precast's."""
