"""Derives the operation tables from the installed PyTorch; run by hand when a new version comes out.

    python -m tools.probe_tables torch               PyTorch's kernels and what each does
    python -m tools.probe_tables default --like cpu  the operations that raise on mixed dtypes
    python -m tools.probe_tables mixed --like cpu    those of them that raise on all mixtures, tried on that device

The second runs the operations of PyTorch's own test suite (OpInfo), their in-place and `out=` variants,
with mixed floating dtypes inside a region that follows the table of one device type, on CPU tensors.
An operation is listed where that raises and the same call with all arguments in the widest dtype works.

Invariants:
    - Nothing is written: the TOML that is printed is to be compared with `src/precast/policy/presets`.
    - Not part of the package.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from precast import _torch
from precast.policy.policy import DEVICE_TYPES, Entry, Policy, Rule, expanded_rules
from tests.support import op_samples
from tests.support.behaviour import consistent_rules, torch_region

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
SAMPLES_PER_OPERATION = 8

# One pair alternates over a call's floating tensors, a triple gives the first tensor its own dtype.
PATTERNS = [
    (first, *[rest] * times)
    for first, rest in itertools.permutations((BF16, F32, F16, F64), 2)
    for times in (1, 2)
]


# Private operations (the public one that calls them is listed); norms that write running statistics,
# which a cast copy would lose; the copying views of functionalization; sparse ones; one that refuses
# 16 bits in any mixture.
LEFT_OUT = re.compile(r"aten::_|(batch|instance)_norm|(?<!index)_copy\.|sparse_|linalg_pinv")


def main(arguments: list[str]) -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(prog="python -m tools.probe_tables")
    parser.add_argument("table", choices=("torch", "default", "mixed"))
    parser.add_argument("--like", choices=DEVICE_TYPES, default="cpu")
    chosen = parser.parse_args(arguments)
    if chosen.table == "torch":
        print(torch_policy().text)
        return
    if chosen.table == "mixed":
        print("\n".join(sorted(refusing_operations(chosen.like))))
        return
    print(f"[ops.{chosen.like}]")
    for name, why in sorted(raising_operations(chosen.like).items()):
        print(f'"{name.removeprefix("aten::")}" = "promote"  # {why}')


def torch_policy() -> Policy:
    """Every kernel at an Autocast key, by the dispatcher's name, with the rule that explains it."""
    tables: dict[str, dict[str, Entry]] = {}
    for device, name in itertools.product(DEVICE_TYPES, sorted(_torch.operator_names())):
        if _torch.has_autocast_kernel(name, device):
            rules: set[Rule] = set()
            with contextlib.suppress(KeyError):  # no samples
                rules = consistent_rules(name, device)
            if len(rules) == 1:
                key = name if "." in name else f"{name}.default"
                tables.setdefault(device, {})[key] = Entry(*rules)
            else:
                print(f"no one rule explains {name} on {device}: {rules}", file=sys.stderr)
    return Policy("torch", tables)


def raising_operations(like: str, only: Container[str] | None = None) -> dict[str, str]:
    """Operators without a rule on a device type that raise on a mixture which could be promoted.

    Args:
        like: the device type whose table the region follows.
        only: the operations to try, by OpInfo's name; all where None.

    Returns:
        The dispatcher's name -> one mixture and PyTorch's words about it.
    """
    known, _ = expanded_rules(Policy.load("torch"), like)
    probe = _Probe(known)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        probe.install()
        for call in _calls(only):
            probe.try_mixtures(call)
    return probe.found


def refusing_operations(device: str, seeds: Iterable[int] = range(40)) -> set[str]:
    """The operations with a row `promote` and without an autocast kernel that refuse every mixture."""
    rows = expanded_rules(Policy.load("default"), device)[0]
    return {
        name
        for name, entry in rows.items()
        if entry.rule is Rule.PROMOTE and not _torch.has_autocast_kernel(name, device)
        if name in op_samples.promoted() | op_samples.named() and refuses_all(name, device, seeds)
    }


def refuses_all(name: str, device: str, seeds: Iterable[int]) -> bool:
    """Return True if an operation raises on every mixture of tensors with several elements, and resizes no argument."""
    overload = _torch.find_overload(name)
    assert overload is not None
    random, refused = Random(0), False
    if _writes_out(overload):
        return False
    for seed in seeds:
        for sample in op_samples.samples(name, seed):
            # An index that is out of bounds ends the use of a GPU in a process.
            keeps = seed == 0 or (
                device != "cpu" and any(not x.is_floating_point() for x in _tensors(sample))
            )
            shaped = sample if keeps else tree_map(lambda leaf: _reshaped(leaf, random), sample)
            on_device = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, shaped)
            if any(x.numel() < 2 for x in tree_leaves(on_device) if isinstance(x, Tensor)):
                continue
            for pattern in PATTERNS:
                dtypes = itertools.chain(pattern, itertools.repeat(pattern[-1]))
                mixed = _cast(on_device, lambda _: next(dtypes))  # noqa: B023
                wide = _widened(mixed)
                if len(set(_floating(mixed))) < 2 or not _accepts(name, wide, device):
                    continue
                if [x.shape for x in _tensors(wide)] != [x.shape for x in _tensors(mixed)]:
                    return False
                if _accepts(name, mixed, device):
                    return False
                refused = True
    return refused


def _reshaped(leaf: Any, random: Random) -> Any:
    """A leaf with fewer or more elements or dimensions, if it is a tensor."""
    if not isinstance(leaf, Tensor) or leaf.dim() == 0 or random.random() < 0.6:
        return leaf
    dim = random.randrange(leaf.dim())
    return random.choice(
        [leaf.narrow(dim, 0, 1), torch.cat([leaf, leaf], dim), leaf[None], leaf.select(dim, 0)]
    )


def _accepts(name: str, sample: Any, device: str) -> bool:
    try:
        with torch_region(device), torch.no_grad():
            op_samples.call(name, sample)
    except Exception:
        return False
    return True


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class _Probe:
    """Kernels at the CPU's Autocast key that follow a table and note what raises."""

    def __init__(self, table: dict[str, Entry]) -> None:
        self.found: dict[str, str] = {}
        self._table = table
        self._library = torch.library.Library("aten", "IMPL")
        self._off = _torch.AutocastOff("cpu")
        self._depth = 0

    def install(self) -> None:
        """Register a kernel for every operator that can get two tensors."""
        for name in sorted(_torch.operator_names()):
            overload = _torch.find_overload(name) if name.startswith("aten::") else None
            if overload is None or (name not in self._table and not _takes_tensors(overload)):
                continue
            kernel = self._ruled if name in self._table else self._unruled
            with _torch.without_override_warning(), contextlib.suppress(RuntimeError):
                self._library.impl(
                    name.removeprefix("aten::"),
                    kernel(name, overload),
                    "AutocastCPU",
                    with_keyset=True,
                )

    def try_mixtures(self, call: Callable[[Callable[[Any], Any]], Any]) -> None:
        """Make one call with its floating tensors in every pattern of dtypes."""
        if _runs(call, (F32,)):
            for pattern in PATTERNS:
                _runs(call, pattern)  # what matters is noted by the kernels

    def _ruled(self, name: str, overload: OpOverload) -> Callable[..., Any]:
        rule = self._table[name].rule

        def kernel(_keyset: Any, *args: Any, **kwargs: Any) -> Any:
            arguments = _as_tensors(overload, args, kwargs)
            with self._off():
                try:
                    args, kwargs = _follow(rule, arguments)
                    return overload(*args, **kwargs)
                except Exception:
                    args, kwargs = _widened(
                        arguments
                    )  # `default` promotes what raises under a rule
                    return overload(*args, **kwargs)

        return kernel

    def _unruled(self, name: str, overload: OpOverload) -> Callable[..., Any]:
        fallthrough = _torch.fallthrough(overload, "cpu")

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = _as_tensors(overload, args, kwargs)
            self._depth += 1
            try:
                return fallthrough(keyset, *args, **kwargs)
            except Exception as error:
                if self._depth == 1 and name not in self.found:  # what a person called
                    self._note(name, overload, (args, kwargs), str(error).splitlines()[0])
                raise
            finally:
                self._depth -= 1

        return kernel

    def _note(self, name: str, overload: OpOverload, arguments: Any, error: str) -> None:
        dtypes = _floating(arguments)
        missing_kernel = "not implemented for" in error or "Unsupported dtype" in error
        narrowing = _writes_out(overload) and F64 in dtypes
        left_out = LEFT_OUT.search(name) is not None
        if len(set(dtypes)) < 2 or missing_kernel or narrowing or left_out:
            return
        args, kwargs = _widened(arguments)
        with contextlib.suppress(Exception), self._off():
            overload(*args, **kwargs)
            mixture = " ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            self.found[name] = f"{mixture}: {error}"


def _calls(only: Container[str] | None) -> Iterator[Callable[[Callable[[Any], Any]], Any]]:
    """Calls of all operations of PyTorch's test suite; each takes what casts its arguments."""
    for info in op_db:
        if not info.supports_dtype(F32, "cpu") or (only is not None and info.name not in only):
            continue
        try:
            samples = list(itertools.islice(info.sample_inputs("cpu", F32), SAMPLES_PER_OPERATION))
        except Exception as error:
            print(f"{info.name}: no samples: {error}", file=sys.stderr)
            continue
        for sample in samples:
            arguments = ((sample.input, *sample.args), sample.kwargs)
            yield _plain(info.op, arguments)
            if info.inplace_variant is not None:
                yield _plain(info.inplace_variant, arguments)
            if info.supports_out:
                yield from (_with_out(info.op, arguments, dtype) for dtype in (F32, BF16, F64))


def _runs(call: Callable[[Callable[[Any], Any]], Any], pattern: tuple[torch.dtype, ...]) -> bool:
    forever = pattern * 50 if len(pattern) == 2 else pattern + pattern[-1:] * 100
    dtypes = iter(forever)
    try:
        with torch_region("cpu"), torch.no_grad():
            call(lambda tree: _cast(tree, lambda _: next(dtypes)))
    except Exception:
        return False
    return True


def _plain(function: Callable[..., Any], arguments: Any) -> Callable[[Callable[[Any], Any]], Any]:
    def call(cast: Callable[[Any], Any]) -> Any:
        args, kwargs = cast(arguments)
        return function(*args, **kwargs)

    return call


def _with_out(
    function: Callable[..., Any], arguments: Any, dtype: torch.dtype
) -> Callable[[Callable[[Any], Any]], Any]:
    def call(cast: Callable[[Any], Any]) -> Any:
        args, kwargs = arguments
        with torch.autocast("cpu", enabled=False):
            out = _cast(function(*_copied(args), **_copied(kwargs)), lambda _: dtype)
        args, kwargs = cast(arguments)
        return function(*args, **kwargs, out=out)

    return call


def _follow(rule: Rule, arguments: Any) -> Any:
    """The arguments as a rule wants them; of its dtype only what decides whether a call raises."""
    eligible = [dtype for dtype in _floating(arguments) if dtype is not F64]
    if rule is Rule.PROMOTE:
        if any(d is not BF16 for d in itertools.takewhile(lambda d: d is not F32, eligible)):
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
        target = F32 if F32 in eligible else BF16
    elif rule in (Rule.LOWER, Rule.FP32):
        target = BF16 if rule is Rule.LOWER else F32
    elif rule is Rule.BANNED:
        raise RuntimeError("unsafe to autocast")
    else:
        return arguments
    return _cast(arguments, lambda dtype: dtype if dtype is F64 else target)


def _cast(tree: Any, target: Callable[[torch.dtype], torch.dtype]) -> Any:
    """A copy of the tree with the floating tensors in other dtypes."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        copy = leaf.detach().clone()
        return copy.to(target(leaf.dtype)) if leaf.is_floating_point() else copy

    return tree_map(convert, tree)


def _widened(arguments: Any) -> Any:
    """The arguments in the widest floating dtype among them."""
    dtypes = _floating(arguments)
    return _cast(arguments, lambda _: functools.reduce(torch.promote_types, dtypes))


def _as_tensors(overload: OpOverload, args: Any, kwargs: Any) -> Any:
    """The arguments with tensors where PyTorch hands a Python kernel the number that it wrapped."""
    declared = _torch.schema_of(overload).arguments
    names = {a.name for a in declared if str(a.type) in ("Tensor", "Optional[Tensor]")}

    def convert(name: str, value: Any) -> Any:
        number = name in names and isinstance(value, (int, float, complex))
        return torch.tensor(value) if number else value

    positional = [convert(a.name, value) for a, value in zip(declared, args, strict=False)]
    return positional, {name: convert(name, value) for name, value in kwargs.items()}


def _copied(tree: Any) -> Any:
    return _cast(tree, lambda dtype: dtype)


def _floating(tree: Any) -> list[torch.dtype]:
    leaves: Iterable[Any] = tree_leaves(tree)
    return [x.dtype for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def _writes_out(overload: OpOverload) -> bool:
    return any(argument.is_out for argument in _torch.schema_of(overload).arguments)


def _takes_tensors(overload: OpOverload) -> bool:
    types = [str(argument.type) for argument in _torch.schema_of(overload).arguments]
    return sum("Tensor" in kind for kind in types) > 1 or any(
        "List" in k and "Tensor" in k for k in types
    )


if __name__ == "__main__":
    main(sys.argv[1:])
