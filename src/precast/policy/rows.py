"""The rows of a policy: the rule of one operation, with a reason and its location in a file.

Invariants:
    - A key is `namespace::name` (every overload that is not an `out=` variant) or
      `namespace::name.overload`; `.default` is the overload with the empty name, as in `torch.ops`.
    - An exact row takes precedence over the row of the bare name.
    - Every problem is a `PolicyError` that begins with its location.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from precast import _torch
from precast._internal import torch_versions
from precast._internal.torch_versions import Version
from precast.errors import PolicyError
from precast.policy.values import check_choice, check_text, clipped, nearest, shown

__all__ = [
    "DEVICE_TYPES",
    "FLOAT8_OPERATIONS",
    "FLOAT8_RULES",
    "FLOAT32_RULES",
    "PRODUCT_OPERATIONS",
    "RESULT_DTYPE_OVERLOADS",
    "ROW_KEYS",
    "Entry",
    "Rule",
    "canonical",
    "check_device_type",
    "check_row",
    "covered_overloads",
    "dispatcher_name",
    "exact_key",
    "is_device_type",
    "overlay",
    "parse_entry",
    "parse_rows",
    "row_in_release",
    "short",
    "split",
]

# The device types that have an Autocast key: _AUTOCAST_SUPPORTED_DEVICES in ATen/autocast_mode.h.
DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu", "mtia", "maia", "hpu", "xla", "ipu", "privateuseone")


def is_device_type(device: object) -> bool:
    """Return True if PyTorch has autocast for this device type."""
    return isinstance(device, str) and device in DEVICE_TYPES


def check_device_type(device: str, where: str = "") -> str:
    """Return the device type; raise a `PolicyError` if PyTorch has no autocast for it."""
    if not is_device_type(device):
        allowed = ", ".join(DEVICE_TYPES)
        subject = f"{where}: {shown(device)}" if where else shown(device)
        raise PolicyError(f"{subject} is not a device type with autocast. Allowed: {allowed}")
    return device


_BUILDS = ("", "cuda", "rocm")
_VERSION = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}")
ROW_KEYS = ("rule", "reason", "builds", "since", "until")
"""The keys of a row, in a policy file and in `Policy.replace`."""

_NAME = re.compile(r"(?:(?P<namespace>\w+)::)?(?P<name>\w+)(?:\.(?P<overload>\w+))?")


class Rule(enum.StrEnum):
    """The treatment of an operation's floating-point arguments inside a region."""

    LOWER = "lower"
    LOWER_OUT_FP32 = "lower_out_fp32"
    FP32 = "fp32"
    FP32_SET_DTYPE = "fp32_set_dtype"
    FP32_APPEND_DTYPE = "fp32_append_dtype"
    FP32_IF_REFUSED = "fp32_if_refused"
    PROMOTE = "promote"
    BANNED = "banned"
    KEEP = "keep"
    FALLTHROUGH = "fallthrough"
    FLOAT8 = "float8"
    FLOAT8_POW2 = "float8_pow2"
    FLOAT8_ROWWISE = "float8_rowwise"
    FLOAT8_HP_GRAD = "float8_hp_grad"

    @property
    def meaning(self) -> str:
        """The meaning of the rule in a few words, also the default reason of a row."""
        return _MEANINGS[self]


_MEANINGS = {
    Rule.LOWER: "arguments are cast to the region's dtype",
    Rule.LOWER_OUT_FP32: "factors are cast to the region's dtype, and their product is in float32",
    Rule.FP32: "arguments are cast to float32",
    Rule.FP32_SET_DTYPE: "computed in float32 through the operation's own dtype argument",
    Rule.FP32_APPEND_DTYPE: "computed in float32 through the overload that takes a dtype",
    Rule.FP32_IF_REFUSED: "runs unchanged; in float32 where PyTorch refuses 16-bit arguments",
    Rule.PROMOTE: "arguments are cast to the widest dtype among them",
    Rule.BANNED: "refused inside a region",
    Rule.KEEP: "runs as it does outside a region",
    Rule.FALLTHROUGH: "runs unchanged, and the operations that it calls follow their own rules",
    Rule.FLOAT8: "matrices are multiplied in 8 bits, with one scale a matrix",
    Rule.FLOAT8_POW2: "matrices are multiplied in 8 bits, with one scale a matrix, a power of two",
    Rule.FLOAT8_ROWWISE: "matrices are multiplied in 8 bits, with a scale a row",
    Rule.FLOAT8_HP_GRAD: "matrices are multiplied in 8 bits, with a scale a row, and gradients of weights in 16 bits",
}

FLOAT32_RULES: Final = (Rule.FP32, Rule.FP32_SET_DTYPE, Rule.FP32_APPEND_DTYPE)
"""The rules under which an operation computes in float32 whatever the dtypes of its arguments."""
FLOAT8_RULES: Final = (Rule.FLOAT8, Rule.FLOAT8_POW2, Rule.FLOAT8_ROWWISE, Rule.FLOAT8_HP_GRAD)
"""The rules that multiply matrices in 8 bits."""
FLOAT8_OPERATIONS: Final = ("aten::addmm", "aten::linear", "aten::matmul", "aten::mm")
"""The operations that can have these rules: PyTorch's float8 kernel multiplies two matrices, not batches of them."""
PRODUCT_OPERATIONS: Final[Mapping[Rule, tuple[str, ...]]] = {
    **dict.fromkeys(FLOAT8_RULES, FLOAT8_OPERATIONS),
    Rule.LOWER_OUT_FP32: (
        *FLOAT8_OPERATIONS,
        *("aten::baddbmm", "aten::bmm", "aten::conv1d", "aten::conv2d", "aten::conv3d"),
        *("aten::conv_transpose1d", "aten::conv_transpose2d", "aten::conv_transpose3d"),
    ),
}
"""The rules that are for products alone, and the operations that can have them."""
RESULT_DTYPE_OVERLOADS: Final = ("dtype", "dtype_out", "out")
"""The overloads of these operations whose arguments decide the dtype of the result, which such a rule cannot."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of a policy's table.

    Attributes:
        rule: the treatment of the arguments.
        reason: the reason, in a few words.
        origin: the file and key of the row; ignored when entries are compared.
        builds: `cuda` or `rocm`, if only such builds of PyTorch have an autocast kernel for the operation.
        since: the first version of PyTorch that the row applies to, such as `2.12`; empty for all.
        until: the first version that it no longer applies to; empty for none.
    """

    rule: Rule
    reason: str = ""
    origin: str = field(default="", compare=False)
    builds: str = ""
    since: str = ""
    until: str = ""

    def __post_init__(self) -> None:
        where = check_text(self.origin, "an Entry's origin") or "Entry"
        if type(self.rule) is not Rule:
            object.__setattr__(self, "rule", _parse_rule(self.rule, where))
        if not check_text(self.reason, f"{where}: the reason"):
            object.__setattr__(self, "reason", self.rule.meaning)
        if not isinstance(self.builds, str) or self.builds not in _BUILDS:
            allowed = ", ".join(repr(build) for build in _BUILDS)
            raise PolicyError(f"{where}: builds is {shown(self.builds)}. Allowed: {allowed}")
        _check_version(self.since, "since", where)
        _check_version(self.until, "until", where)

    def is_for(self, version: Version) -> bool:
        """Return True if the row applies to this version of PyTorch; other rows are ignored."""
        return not (
            (self.since and version < torch_versions.parse(self.since))
            or (self.until and version >= torch_versions.parse(self.until))
        )


def canonical(text: object, where: str = "operation") -> str:
    """Return the key for an operation's name: `softmax.int` -> `aten::softmax.int`."""
    match = _match(text) if isinstance(text, str) else None
    if match is None:
        raise PolicyError(
            f"{where}: {shown(text)} is not the name of an operation; write 'linear', 'softmax.int' "
            "or 'mylib::myop' (the dispatcher's names, not a Python path)"
        )
    return str(text) if match["namespace"] else f"aten::{text}"


@functools.lru_cache(1 << 14)  # each new policy checks all its keys again
def _match(text: str) -> re.Match[str] | None:
    return _NAME.fullmatch(text)


def short(key: str) -> str:
    """Return the name without `aten::`, as in policy files."""
    return key.removeprefix("aten::")


def split(key: str) -> tuple[str, str | None]:
    """Split a key: `aten::softmax.int` -> (`aten::softmax`, `int`); a bare name has the overload None."""
    operation, dot, overload = key.partition(".")
    return operation, overload if dot else None


def exact_key(operation: str, overload: str) -> str:
    """Return the exact key for an overload with PyTorch's name for it (`""` is the default)."""
    return f"{operation}.{overload or 'default'}"


def dispatcher_name(key: str) -> str:
    """Return an exact key in the dispatcher's spelling: no suffix for the default overload."""
    return key.removesuffix(".default")


def covered_overloads(operation: str) -> list[str]:
    """Return the overloads that a bare name includes: those of the installed torch without `out=`."""
    overloads = _torch.operator_overloads(operation)
    return [name for name, schema in overloads.items() if not _writes_out(schema)]


def parse_entry(value: object, where: str) -> Entry:
    """Return an entry for a rule, its name, or a mapping with `rule` and optionally the other `ROW_KEYS`."""
    if isinstance(value, Entry):
        return value
    if isinstance(value, Mapping):
        return _entry_from_mapping(value, where)
    return Entry(_parse_rule(value, where), origin=where)


def parse_rows(
    rows: Mapping[Any, object], where: str, version: Version = _torch.VERSION, *, check: bool = True
) -> dict[str, Entry]:
    """Return the rows for one version of PyTorch, by their keys."""
    parsed: dict[str, Entry] = {}
    for name, value in rows.items():
        location = f"{where} {clipped(name)}"
        key, entry = canonical(name, location), parse_entry(value, location)
        if entry.is_for(version):
            if check:
                check_row(key, entry, location)
            parsed[key] = entry
    return parsed


def check_row(key: str, entry: Entry, where: str) -> None:
    """Check that PyTorch has the operation and that it can follow the rule.

    Operations outside the namespace `aten` may be registered later, so they may be missing.
    """
    operation, overload = split(key)
    overloads = _torch.operator_overloads(operation)
    if not overloads and not operation.startswith("aten::"):
        return
    _check_exists(operation, overload, overloads, where)
    _check_multiplies(operation, overload, entry.rule, where)
    names = covered_overloads(operation) if overload is None else [overload]
    for name in names:
        _check_takes_dtype(operation, "" if name == "default" else name, entry.rule, where)


def overlay(base: Mapping[str, Entry], rows: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return `base` with the rows replaced that `rows` has; a bare name replaces every row that it includes."""
    bare = {key for key in rows if split(key)[1] is None}
    others = {key: entry for key, entry in base.items() if not bare or not _is_covered(key, bare)}
    return others | dict(rows)


def row_in_release(key: str, entry: Entry, release: Version) -> Entry | None:
    """Return the row to follow on the installed PyTorch for a row of a preset that is pinned to a release.

    A row for the release applies to any PyTorch that has the operation. If PyTorch added the operation to its tables
    later, the release has no rule but the installed PyTorch has a kernel, which the rule `fallthrough` skips.

    Returns:
        The row; None for none.
    """
    if not (entry.since or entry.until):
        return entry
    if not _is_installed(key):
        return None
    if entry.is_for(release):
        return Entry(entry.rule, entry.reason, entry.origin, entry.builds)
    if not entry.is_for(_torch.VERSION):
        return None
    reason = (
        f"PyTorch {torch_versions.spell(release)} has no rule for it: {Rule.FALLTHROUGH.meaning}"
    )
    return Entry(Rule.FALLTHROUGH, reason, entry.origin, entry.builds)


def _parse_rule(value: object, where: str) -> Rule:
    lower = dict.fromkeys(("float16", "bfloat16"), str(Rule.LOWER))
    dtypes = {"float32": str(Rule.FP32)}
    return Rule(
        check_choice(value, Rule, f"{where}: ", " is not a rule", dtypes=dtypes, hints=lower)
    )


def _entry_from_mapping(value: Mapping[object, object], where: str) -> Entry:
    unknown = [key for key in value if not (isinstance(key, str) and key in ROW_KEYS)]
    if unknown or "rule" not in value:
        names = ", ".join(map(shown, unknown[:3]))
        problem = f"{names} is not allowed here" if unknown else "there is no 'rule'"
        raise PolicyError(
            f'{where}: {problem}; write a rule\'s name or {{ rule = "keep", reason = "...", '
            'builds = "cuda", since = "2.12", until = "2.14" } (only the rule is required); '
            'a name with an overload needs quotes, as in "softmax.int" = "keep"'
        )
    rule = _parse_rule(value["rule"], where)
    reason, builds, since, until = (cast("str", value.get(key, "")) for key in ROW_KEYS[1:])
    return Entry(rule, reason, where, builds, since, until)  # the constructor checks them


def _check_version(value: object, key: str, where: str) -> None:
    if not isinstance(value, str) or (value and not _VERSION.fullmatch(value)):
        raise PolicyError(
            f'{where}: {key} is {shown(value)}; it must be a version of PyTorch as text: {key} = "2.13"'
        )


def _check_exists(
    operation: str, overload: str | None, overloads: Mapping[str, object], where: str
) -> None:
    if not overloads:
        names = {short(split(name)[0]) for name in _torch.operator_names()}
        raise PolicyError(
            f"{where}: the installed PyTorch has no operation {clipped(operation)}"
            f"{nearest(short(operation), names)} Allowed: its operators, and names of other "
            "namespaces such as 'mylib::myop'"
        )
    if overload is not None and overload not in {name or "default" for name in overloads}:
        allowed = ", ".join(short(exact_key(operation, name)) for name in overloads)
        raise PolicyError(
            f"{where}: {operation} has no overload {shown(overload)}. Allowed: {allowed}"
        )


def _check_takes_dtype(operation: str, overload: str, rule: Rule, where: str) -> None:
    overloads = _torch.operator_overloads(operation)
    name = short(dispatcher_name(exact_key(operation, overload)))
    arguments = [argument.name for argument in overloads[overload].arguments]
    if rule is Rule.FP32_SET_DTYPE and "dtype" not in arguments:
        raise PolicyError(
            f"{where}: {name} has no dtype argument, so it cannot be '{rule}'; "
            "use 'fp32', or name the overloads that have one"
        )
    longer = ([a.name for a in schema.arguments] for schema in overloads.values())
    if rule is Rule.FP32_APPEND_DTYPE and [*arguments, "dtype"] not in longer:
        raise PolicyError(
            f"{where}: {name} has no overload that takes a dtype after its arguments, so it "
            f"cannot be '{rule}'; use 'fp32'"
        )


def _check_multiplies(operation: str, overload: str | None, rule: Rule, where: str) -> None:
    allowed = PRODUCT_OPERATIONS.get(rule)
    if allowed is None:
        return
    if operation not in allowed or overload in RESULT_DTYPE_OVERLOADS:
        name = short(operation if overload is None else exact_key(operation, overload))
        obstacle = (
            "PyTorch has no float8 kernel for it" if rule in FLOAT8_RULES else "it is no product"
        )
        raise PolicyError(
            f"{where}: {name} cannot be '{rule}': {obstacle}. Allowed: {', '.join(map(short, allowed))}; all "
            "others can be 'lower'"
        )


def _is_covered(key: str, bare: set[str]) -> bool:
    operation, overload = split(key)
    if operation not in bare or overload is None:
        return False
    schema = _torch.operator_overloads(operation).get("" if overload == "default" else overload)
    return schema is None or not _writes_out(schema)


def _writes_out(schema: object) -> bool:
    return any(argument.is_out for argument in schema.arguments)  # type: ignore[attr-defined]


def _is_installed(key: str) -> bool:
    operation, overload = split(key)
    overloads = _torch.operator_overloads(operation)
    return (
        bool(overloads)
        if overload is None
        else overload in {name or "default" for name in overloads}
    )
