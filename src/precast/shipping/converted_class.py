"""The class of a converted model: the model's own class, whose calls run under the policy that it was converted with.

Invariants:

- the class has the name of the model's own and is a subclass of it, so that libraries that ask for either go on;
- a call runs in a region of the policy, whatever region is around it; where that one says something else, a warning
  tells so once;
- nothing is called in training mode, because the weights are for inference.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import is_autocast_enabled, nn
from torch.compiler import is_dynamo_compiling

from precast.autocast_mode.region import autocast
from precast.engine.thread_state import thread_state
from precast.errors import ConversionError, PrecastWarning
from precast.shipping.conversion import Conversion
from precast.shipping.stored_weights import inside

__all__ = ["Carried", "carried_by", "converted_class", "is_converted"]

_KEY = "_precast_carried"


@dataclass(eq=False)
class Carried:
    """What a converted model carries with it.

    Attributes:
        region: the region that its calls run in.
        report: what became of its weights.
        methods: the names of the methods that run in the region, too.
        told: what a region around said that was told of.
    """

    region: autocast
    report: Conversion
    methods: tuple[str, ...]
    told: list[str] = field(default_factory=list)

    @functools.cached_property
    def device(self) -> str:
        """The device type of the region."""
        return self.region.device

    def check(self, model: nn.Module) -> None:
        """Refuses training, and tells of a region around that says something else.

        Raises:
            ConversionError: the model is in training mode.
        """
        if model.training:
            raise ConversionError(
                f"this {type(model).__name__} was converted for inference, and is in training mode. Call model.eval(), "
                "or train the float32 model and convert it again."
            )
        device = self.device
        if not self.told and is_autocast_enabled(device):
            self._compare(torch.get_autocast_dtype(device), device)

    def _compare(self, dtype: torch.dtype, device: str) -> None:
        bound = thread_state(device).state.bound_policy
        policy = self.region.policy
        other = (
            bound is not None
            and policy is not None
            and bound.policy.fingerprint != policy.fingerprint
        )
        if dtype is self.region.fast_dtype and not other:
            return
        around = f"{dtype}" + (f" and the policy {bound.policy.name!r}" if bound and other else "")
        self.told.append(around)
        warnings.warn(
            f"the region around says {around}; the converted {self.report.model} follows what it was converted with: "
            f"{self.region.fast_dtype} and the policy {self.report.policy!r}. Convert the model anew for the other.",
            PrecastWarning,
            stacklevel=4,
        )


def is_converted(model: nn.Module) -> bool:
    """Whether `convert` made this model."""
    return _KEY in vars(model)


def carried_by(model: nn.Module) -> Carried:
    """What a converted model carries."""
    carried: Carried = vars(model)[_KEY]
    return carried


@functools.cache
def converted_class(base: type[nn.Module], methods: tuple[str, ...]) -> type[nn.Module]:
    """The class of converted models of a class; the same one each time."""
    forward = base.forward
    if inspect.isgeneratorfunction(forward) or inspect.iscoroutinefunction(forward):
        carries = {"forward": _in_steps(forward)}
    else:
        carries = {"forward": _in_region(forward), "__call__": _in_region(base.__call__)}
    for name in methods:
        carries[name] = _in_region(getattr(base, name))

    def body(namespace: dict[str, Any]) -> None:
        namespace.update(
            carries,
            __module__=base.__module__,
            __qualname__=base.__qualname__,
            __doc__=base.__doc__,
            __reduce_ex__=_reduce_ex(base, methods),
            __repr__=_repr(base),
            __prepare_scriptable__=_not_scripted,
            precast_report=property(_report, doc="What `precast.convert` did to this model."),
        )

    return types.new_class(base.__name__, (base,), exec_body=body)


def carry(model: nn.Module, carried: Carried) -> None:
    """Has the calls of a model run under the policy."""
    vars(model)[_KEY] = carried
    model.__class__ = converted_class(type(model), carried.methods)  # type: ignore[arg-type]


def _report(model: nn.Module) -> Conversion:
    return carried_by(model).report


def _repr(base: type[nn.Module]) -> Callable[[nn.Module], str]:
    def text(model: nn.Module) -> str:
        """The base's text, in which each module with weights says in which dtype they are stored."""
        modules = [m for m in model.modules() if _stored(m) and "extra_repr" not in vars(m)]
        for module in modules:
            vars(module)["extra_repr"] = functools.partial(_with_dtypes, module)
        try:
            return base.__repr__(model)
        finally:
            for module in modules:
                vars(module).pop("extra_repr", None)

    return text


def _with_dtypes(module: nn.Module) -> str:
    return ", ".join(filter(None, (type(module).extra_repr(module), _stored(module))))


def _stored(module: nn.Module) -> str:
    """The dtypes that a module's own weights are stored in: "stored in bfloat16"; the empty text without weights."""
    named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    by_dtype: dict[str, list[str]] = {}
    for name, tensor in named:
        if tensor.is_floating_point():
            dtype = getattr(tensor, "stored_dtype", tensor.dtype)
            by_dtype.setdefault(str(dtype).removeprefix("torch."), []).append(name)
    if len(by_dtype) == 1:
        return f"stored in {next(iter(by_dtype))}"
    each = [f"{' and '.join(names)} in {dtype}" for dtype, names in by_dtype.items()]
    return f"stored: {', '.join(each)}" if each else ""


def _not_scripted(model: nn.Module) -> nn.Module:
    """What `torch.jit.script` asks a module for before it compiles it."""
    raise ConversionError(
        f"a converted {carried_by(model).report.model} cannot be compiled by torch.jit.script, which sees no region. "
        "Record it with torch.jit.trace(model, example), or write a program with precast.export."
    )


def _in_region(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        carried: Carried = self.__dict__[_KEY]
        if is_dynamo_compiling():
            with carried.region.anew():
                return method(self, *args, **kwargs)
        models = inside.models
        if models and models[-1] is self:
            return method(self, *args, **kwargs)
        if self.training or (not carried.told and is_autocast_enabled(carried.device)):
            carried.check(self)
        models.append(self)
        try:
            with carried.region:
                return method(self, *args, **kwargs)
        finally:
            models.pop()

    return run


def _in_steps(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        carried = carried_by(self)
        carried.check(self)
        return carried.region(forward)(self, *args, **kwargs)

    return run


def _reduce_ex(base: type[nn.Module], methods: tuple[str, ...]) -> Callable[..., Any]:
    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        _, _, *rest = cast(tuple[Any, ...], base.__reduce_ex__(self, max(2, int(protocol))))
        return _new, (base, methods), *rest

    return reduce_ex


def _new(base: type[nn.Module], methods: tuple[str, ...]) -> nn.Module:
    cls = converted_class(base, methods)  # type: ignore[arg-type]
    return cls.__new__(cls)
