"""Calls of operators on tensors of every layout, compared between a watched and an unwatched run."""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import precast
from precast.engine import registration

__all__ = ["LAYOUTS", "SETTINGS", "Call", "Logged", "Wrapped", "compare"]


class Logged(Tensor):
    """A subclass whose ``__torch_function__`` counts its calls and refuses to give numbers."""

    calls: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls[getattr(func, "__name__", str(func))] += 1
        if func in (Tensor.item, Tensor.tolist, Tensor.__float__):
            raise TypeError("no numbers are given")
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(Tensor):
    """A wrapper subclass whose ``__torch_dispatch__`` refuses casts, extremes and numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten._to_copy.default, aten.aminmax.default, aten._local_scalar_dense.default):
            raise NotImplementedError(f"{func} is refused")
        plain = partial(_pytree.tree_map_only, Wrapped, lambda t: t.inner)
        return _pytree.tree_map_only(Tensor, Wrapped, func(*plain(args), **plain(kwargs or {})))


def _matrix(tensor: Tensor) -> Tensor:
    if tensor.dim() < 2 or 0 in tensor.shape:
        raise ValueError("no matrix")
    return tensor


def _complex(tensor: Tensor) -> Tensor:
    return torch.complex(tensor.float(), tensor.float())


def _nested(tensor: Tensor, layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([tensor, tensor[: max(1, len(tensor) // 2)]], layout=layout)


def _quantized(tensor: Tensor) -> Tensor:
    return torch.quantize_per_tensor(tensor, 0.1, 10, torch.quint8)


_fake = FakeTensorMode()

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t,
    "bfloat16": Tensor.bfloat16,
    "strides": lambda t: torch.stack([t, t], -1)[..., 0],
    "expanded": lambda t: t[..., :1].expand(t.shape),
    "no numbers": lambda t: t[..., :0],
    "zero dimensions": lambda t: t.reshape(-1)[0],
    "complex": _complex,
    "conjugated": lambda t: _complex(t).conj(),
    "negated": torch._neg_view,
    "meta": lambda t: t.to("meta"),
    "fake": _fake.from_tensor,
    "COO": lambda t: t.to_sparse(),
    "COO, not coalesced": lambda t: torch.sparse_coo_tensor(
        torch.zeros(1, 2, dtype=torch.long),
        torch.stack([t[0], t[0]]),
        t.shape,
        check_invariants=False,
    ),
    "CSR": lambda t: _matrix(t).to_sparse_csr(),
    "CSC": lambda t: _matrix(t).to_sparse_csc(),
    "BSR": lambda t: _matrix(t).to_sparse_bsr((1, 1)),
    "BSC": lambda t: _matrix(t).to_sparse_bsc((1, 1)),
    "mkldnn": lambda t: t.to_mkldnn(),
    "jagged": lambda t: _nested(t, torch.jagged),
    "nested": lambda t: _nested(t, torch.strided),
    "masked": lambda t: torch.masked.masked_tensor(t, t > 0),
    "quantized": _quantized,
    "parameter": nn.Parameter,
    "buffer": nn.Buffer,
    "uninitialized": lambda t: nn.UninitializedParameter(),
    "two tensors": lambda t: TwoTensor(t, t.clone()),
    "logged": lambda t: t.as_subclass(Logged),
    "wrapped": Wrapped,
}
"""Name -> a tensor of that layout with the numbers of a dense float32 one; an exception where there is none."""

WATCHERS: dict[str, Callable[[], Any]] = {
    "trace": precast.trace,
    "count": lambda: precast.trace(full=False),
}


class PlainMode(TorchDispatchMode):
    """A mode that does nothing. Under any mode PyTorch has other formulas for some operations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


SETTINGS: dict[str, Callable[[], Any]] = {
    "gradients": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


class Call(NamedTuple):
    """A call of an operator.

    Attributes:
        function: the operator.
        given: its arguments, a tuple and a dict, with dense tensors.
        layout: the layout that its floating-point tensors get, one of `LAYOUTS`.
        setting: one of `SETTINGS`.
        region: whether it runs in a region of precast.
    """

    function: Callable[..., Any]
    given: Any
    layout: str
    setting: str
    region: bool


def outcome(call: Call, watch: Callable[[], Any] = contextlib.nullcontext) -> str | None:
    """Return what a call gives, as text: results, arguments, gradients, errors, warnings, random numbers.

    None if no tensor has such a layout.
    """
    args, kwargs, converted = _converted(
        call.layout, call.given, learns=call.setting == "gradients"
    )
    if not converted:
        return None
    result: Any = None
    error = ""
    Logged.calls.clear()
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        stack.enter_context(watch())
        stack.enter_context(precast.autocast("cpu", enabled=call.region))
        stack.enter_context(SETTINGS[call.setting]())
        try:
            result = call.function(*args, **kwargs)
            roots = [t for t in _leaves(result) if isinstance(t, Tensor) and t.requires_grad]
            if roots and call.setting == "gradients":
                torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        except Exception as raised:
            error = f"{type(raised).__name__}: {_UNSTABLE.sub('', str(raised))}"
    called = dict(Logged.calls)
    # Each once: how often depends on PyTorch's formula for backward, which any dispatch mode changes.
    said = list(dict.fromkeys(f"{each.category.__name__}: {each.message}" for each in caught))
    texts = [_text(value) for value in (result, args, kwargs, torch.get_rng_state())]
    return re.sub(r"0x[0-9a-f]+|\bj\d+\b", "#", repr([error, *texts, said, called]))


_UNSTABLE = re.compile(
    r"(?s)(is only available for these backends| while calling a Python object|Exception raised from).*"
)
"""A list of all kernels, to which a watcher adds some; the place at which Python's stack ended; and C++'s stack."""


def _converted(layout: str, given: Any, *, learns: bool) -> tuple[Any, Any, int]:
    converted = 0

    def convert(tensor: Tensor) -> Tensor:
        nonlocal converted
        tensor = tensor.detach().clone()
        if not tensor.is_floating_point():
            return tensor
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            tensor = LAYOUTS[layout](tensor)
            converted += 1
        with contextlib.suppress(Exception):
            tensor.requires_grad_(learns)
        return tensor

    args, kwargs = _pytree.tree_map_only(Tensor, convert, given)
    return args, kwargs, converted


def _text(value: Any) -> Any:
    return [_describe(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in _leaves(value)]


def _leaves(value: Any) -> list[Any]:
    return [] if value is None else _pytree.tree_leaves(value)


def _describe(tensor: Tensor) -> Any:
    """Return a tensor's properties and bits. Versions of gradients are left out: under any dispatch mode, PyTorch has
    other formulas for backward, which write no tensor in place."""
    with torch._C.DisableTorchFunction():
        kind = type(tensor).__name__
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            return kind
        if isinstance(tensor, torch.masked.MaskedTensor):
            return kind, _describe(tensor._masked_data), _describe(tensor._masked_mask)
        about = (
            kind,
            tensor.dtype,
            tensor.layout,
            tensor.requires_grad,
            type(tensor.grad_fn).__name__,
        )
        gradient = tensor.grad if tensor.is_leaf else None
        return *about, *_parts(tensor), None if gradient is None else _describe(gradient)


def _parts(tensor: Tensor) -> list[Any]:
    if isinstance(tensor, TwoTensor):
        return [_describe(tensor.a), _describe(tensor.b)]
    if isinstance(tensor, Wrapped):
        return [_describe(tensor.inner)]
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return [tensor.shape]
    if tensor.is_nested:
        if tensor.layout is torch.jagged:
            return [_describe(tensor._values), _describe(tensor._offsets)]  # type: ignore[attr-defined]
        return [_bits(part) for part in tensor.detach().unbind()]
    numbers = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [
            tensor.shape,
            tensor.is_coalesced(),
            *map(_bits, (numbers._indices(), numbers._values())),
        ]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [
            tensor.shape,
            *map(_bits, (numbers.crow_indices(), numbers.col_indices(), numbers.values())),
        ]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [
            tensor.shape,
            *map(_bits, (numbers.ccol_indices(), numbers.row_indices(), numbers.values())),
        ]
    if tensor.is_mkldnn:
        return [tensor.shape, _bits(numbers.to_dense())]
    if tensor.is_quantized:
        return [tensor.shape, _bits(numbers.int_repr())]
    flags = tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()
    return [tensor.shape, *flags, _bits(numbers)]


def _bits(tensor: Tensor) -> list[int]:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or not tensor.numel():
        return []
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    bits: list[int] = flat.view(torch.uint8).tolist()
    return bits


def difference(call: Call, watcher: str) -> str | None:
    """Return how a watched call differs from an unwatched one, as text.

    None where they agree, where unwatched calls differ from each other, or where a trace does what any mode does.
    """
    plain, watched = outcome(call), outcome(call, WATCHERS[watcher])
    if plain is None or watched is None or plain == watched or plain != outcome(call):
        return None
    if watcher == "trace" and watched == outcome(call, PlainMode):
        return None
    letters = enumerate(zip(plain, watched, strict=False))
    place = next((number for number, (a, b) in letters if a != b), 0)
    begin, end = max(0, place - 100), place + 200
    return f"unwatched: ...{plain[begin:end]}\nwatched:   ...{watched[begin:end]}"


def compare(calls: Sequence[Call], engine: str) -> tuple[Counter[str], list[str]]:
    """Run calls watched and unwatched in child processes, as some end a process even where nobody watches.

    Returns:
        The number of calls that agree, differ, or end the process; and a text for each that should not.
    """
    totals: Counter[str] = Counter()
    texts: list[str] = []
    begin = 0
    while begin < len(calls):
        lines = _in_child(partial(_write_differences, calls[begin:], engine))
        begin += lines.count("call")
        totals["agree"] += lines.count("agree")
        differ = [str(ast.literal_eval(line)) for line in lines if line.startswith(("'", '"'))]
        totals["differ"] += len(differ)
        texts += differ
        if lines[-1:] == ["end"]:
            break
        if not lines:
            raise RuntimeError("the child process ended before the first call")
        call = calls[begin - 1]
        survives = "end" in _in_child(partial(_run_unwatched, call, engine))
        totals["end the process when watched" if survives else "end the process unwatched"] += 1
        if survives:
            texts.append(f"{call.layout}, {call.setting}, region={call.region} ended the process")
    return totals, texts


def _in_child(run: Callable[[Callable[[str], object]], None]) -> list[str]:
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            faulthandler.disable()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            run(lambda line: os.write(writes, f"{line}\n".encode()))
        os._exit(0)
    os.close(writes)
    with open(reads, encoding="utf-8", errors="replace") as lines:
        written = lines.read().splitlines()
    os.waitpid(child, 0)
    return written


def _write_differences(calls: Sequence[Call], engine: str, write: Callable[[str], object]) -> None:
    with registration.use_engine(engine):
        for call in calls:
            write("call")
            for watcher in WATCHERS:
                text = difference(call, watcher)
                place = f"{watcher}, {call.layout}, {call.setting}, region={call.region}"
                write("agree" if text is None else repr(f"{place}:\n{text}"))
    write("end")


def _run_unwatched(call: Call, engine: str, write: Callable[[str], object]) -> None:
    with registration.use_engine(engine):
        outcome(call)
    write("end")
