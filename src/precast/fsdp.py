"""FSDP2 (`fully_shard`) with the precision of a policy.

import precast.fsdp

model = precast.fsdp.shard(model, policy, units=model.layers)

Invariants:

- a parameter is gathered in 16 bits only if the policy casts it to that dtype where it is used. So the results are, bit
  for bit, those of a region on the unsharded model;
- gradients are reduced in float32;
- FSDP casts no inputs: a region casts the arguments of each operation, and an attachment those of a module with a rule,
  also in nested containers and dataclasses. Buffers keep their dtype.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import nn

from precast.autocast_mode.arguments import dtype_of
from precast.policy.module_names import name_of_each
from precast.policy.policy import Policy, Rule, as_policy, module_context

if TYPE_CHECKING:  # loading it takes as long as loading the rest of precast
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["mixed_precision_policy", "shard"]

_Model = TypeVar("_Model", bound=nn.Module)
_PRODUCTS: Final[dict[type[nn.Module], str]] = {
    nn.Linear: "linear",
    **{getattr(nn, f"Conv{n}d"): f"conv{n}d" for n in (1, 2, 3)},
    **{getattr(nn, f"ConvTranspose{n}d"): f"conv_transpose{n}d" for n in (1, 2, 3)},
}
"""Modules that use their parameters in one operation, with a rule in all presets."""
_NEVER_CALLED: Final = nn.modules.linear.NonDynamicallyQuantizableLinear
"""The projection in `nn.MultiheadAttention`, whose weight is read without a call."""


def mixed_precision_policy(
    policy: Policy | str | os.PathLike[str],
    name: str = "",
    *,
    dtype: torch.dtype | str = torch.bfloat16,
    op: str = "linear",
    device_type: str | None = None,
) -> MixedPrecisionPolicy:
    """Return the argument `mp_policy` of `fully_shard` for a module whose parameters one operation uses.

    Args:
        policy: The policy: a `Policy`, a preset's name or a file's path.
        name: The module's name in the model, by which rules in `[modules]` apply; "" is the model.
        dtype: The 16-bit dtype of the region.
        op: The operation that uses the parameters, such as "conv2d".
        device_type: The device type of the region; that of the accelerator by default, else "cpu".

    Returns:
        A policy that gathers the parameters in 16 bits if the operation's rule is `lower`, and else in their own dtype.
        Gradients are reduced in float32. Inputs are not cast: a region does that.

    Examples:
        >>> import precast.fsdp
        >>> policy = Policy.load("default").replace(modules={"head": "fp32"})
        >>> precast.fsdp.mixed_precision_policy(policy, "layers.0.up").param_dtype
        torch.bfloat16
        >>> precast.fsdp.mixed_precision_policy(policy, "head").param_dtype is None
        True
    """
    policy = as_policy(policy)
    rule = policy.resolve(op, device_type or _default_device(), name).rule
    if rule is not Rule.LOWER:
        return _in_own_dtype()
    inside = module_context(policy, name).dtype
    lower = dtype_of(dtype if inside is None else str(inside))
    return replace(_in_own_dtype(), param_dtype=lower)


def shard(
    model: _Model,
    policy: Policy | str | os.PathLike[str] = "default",
    *,
    dtype: torch.dtype | str = torch.bfloat16,
    units: Iterable[nn.Module] = (),
    ops: Mapping[type[nn.Module], str] | None = None,
    **options: Any,
) -> _Model:
    """Call `fully_shard` for a model, with a `MixedPrecisionPolicy` for each of its modules from a policy.

    In each unit the modules with the rule `lower` are gathered together, in 16 bits. Norms, embeddings, layers with
    another rule and all other parameters are gathered in their own dtype. Open a region of the same policy and dtype
    for each step; attach the policy afterwards if it has rules for modules.

    Args:
        model: The model, which is changed.
        policy: The policy of the region: a `Policy`, a preset's name or a file's path.
        dtype: The 16-bit dtype of the region.
        units: Modules that are gathered and freed as wholes, such as the blocks of a transformer, inner ones first. The
            rest of the model is one more unit.
        ops: Classes of your own modules, with the one operation that uses their parameters, such as
            ``{Experts: "_grouped_mm"}``. They are gathered as that operation casts them.
        **options: Further arguments of `fully_shard`, such as `mesh`, `reshard_after_forward` and `offload_policy`.

    Returns:
        The model.
    """
    mesh = options.get("mesh")
    device_type = _default_device() if mesh is None else mesh.device_type
    names = {id(module): name for name, module in name_of_each(model)}
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )

    products = {**(ops or {}), **_PRODUCTS}

    def policy_of(module: nn.Module) -> MixedPrecisionPolicy:
        op = next((op for kind, op in products.items() if isinstance(module, kind)), None)
        is_shared = any(owners[id(parameter)] > 1 for parameter in module.parameters())
        if op is None or is_shared or isinstance(module, _NEVER_CALLED) or _is_odd(module, op):
            return _in_own_dtype()
        name = names.get(id(module), "")
        return mixed_precision_policy(policy, name, dtype=dtype, op=op, device_type=device_type)

    all_units: list[nn.Module] = [*units, model]
    for unit in all_units:
        _shard_unit(unit, policy_of, options)
    return model


def _shard_unit(
    unit: nn.Module, policy_of: Callable[[nn.Module], MixedPrecisionPolicy], options: dict[str, Any]
) -> None:
    """Shard the modules of a unit with each policy together; the hooks of one of the policies are those of the unit.

    That is the one with most parameters in 16 bits, as the results of products may be views, which a hook on the
    product makes unfit for operations in place.
    """
    from torch.distributed.fsdp import fully_shard

    own_dtype = _in_own_dtype()
    low: dict[MixedPrecisionPolicy, list[nn.Module]] = {}
    rest: list[nn.Module] = []
    for module in _unsharded(unit):
        if next(module.parameters(recurse=False), None) is not None:
            own = policy_of(module)
            (rest if own == own_dtype else low.setdefault(own, [])).append(module)
    sizes = {own: sum(map(_size, modules)) for own, modules in low.items()}
    main = max(sizes, key=sizes.__getitem__) if low and unit not in rest else own_dtype
    inside_rest = {id(module) for outer in rest for module in outer.modules()}
    for own, modules in low.items():
        alone = [module for module in modules if own != main or id(module) in inside_rest]
        if alone:
            fully_shard(alone, mp_policy=own, **options)
    if rest and main != own_dtype:
        fully_shard(_outermost(rest), mp_policy=own_dtype, **options)
    fully_shard(unit, mp_policy=main, **options)


def _unsharded(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those in it, apart from those that are sharded already, each before those in it."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(module, FSDPModule):
        yield module
        for child in module.children():
            yield from _unsharded(child)


def _outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that are not inside another one; a module comes before those in it."""
    covered: set[int] = set()
    outermost = []
    for module in modules:
        if id(module) not in covered:
            outermost.append(module)
            covered.update(map(id, module.modules()))
    return outermost


def _is_odd(module: nn.Module, op: str) -> bool:
    """Return True if `_grouped_mm` runs in float32 for the size of a parameter, also with the rule `lower`."""
    weights = module.parameters(recurse=False)
    return op == "_grouped_mm" and any(size % 8 for weight in weights for size in weight.shape[-2:])


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _in_own_dtype() -> MixedPrecisionPolicy:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)


def _default_device() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type
