"""Writes `src/precast/weights/native/boundary.h`, the C++ side of `boundary.py`.

python -m tools.native_boundary          write it
python -m tools.native_boundary --check  exit with 1 if it differs
"""

from __future__ import annotations

import ctypes
import enum
import sys
import textwrap
from pathlib import Path
from typing import Any, Final

from precast._internal import atomic_write
from precast.weights.native import boundary

__all__ = ["TARGET", "header"]

TARGET: Final = Path(boundary.__file__).with_suffix(".h")
_HEAD: Final = """\
// The boundary between Python and the library. Made from boundary.py by `python -m tools.native_boundary`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace precast {
"""
_EXPORTED: Final = (
    ["#pragma GCC visibility push(default)", 'extern "C" {'],
    ["}", "#pragma GCC visibility pop"],
)
_ENUMERATIONS: Final = (
    boundary.Action,
    boundary.Mixture,
    boundary.Eviction,
    boundary.Owner,
    boundary.ThreadKind,
    boundary.RegionPart,
    boundary.RegionExit,
)


def header() -> str:
    """Return the content of `boundary.h`."""
    structures = map(_structure, (boundary.HeldRecord(), boundary.ThreadNumbers()))
    return "\n".join([_HEAD, *map(_enumeration, _ENUMERATIONS), *structures, _functions()])


def _enumeration(kind: type[enum.IntEnum]) -> str:
    members = ", ".join(f"{_member(each.name)} = {each.value}" for each in kind)
    return f"enum class {kind.__name__} : uint8_t {{ {members} }};"


def _member(name: str) -> str:
    return "PyTorch" if name == "PYTORCH" else name.title().replace("_", "")


def _structure(initial_values: ctypes.Structure) -> str:
    """Return a structure with its initial values, and assertions on its layout."""
    kind: Any = type(initial_values)
    lines = ["", f"struct {kind.__name__} {{"]
    for name, ctype in kind._fields_:
        plain = "uint64_t" if "ulong" in ctype.__name__ else "int64_t"
        shared, value = boundary.SHARED_BY_THREADS.get(name), getattr(initial_values, name)
        initial = f"{shared}{{{value}}}" if shared == "Owner" else value
        lines.append(
            f"  std::atomic<{shared}> {name}{{{initial}}};"
            if shared
            else f"  {plain} {name} = {value};"
        )
    lines += ["};", f"static_assert(sizeof({kind.__name__}) == {ctypes.sizeof(kind)});"]
    lines += [
        f"static_assert(offsetof({kind.__name__}, {name}) == {getattr(kind, name).offset});"
        for name, _ in kind._fields_
    ]
    return "\n".join(lines)


def _functions() -> str:
    lines = ["", "using Callback = void (*)();", "", "}  // namespace precast", "", *_EXPORTED[0]]
    for function in boundary.FUNCTIONS:
        parameters = ", ".join(f"{_cpp(kind)} {name}" for name, kind in function.parameters.items())
        prototype = f"{function.result.cpp} precast_{function.name}({parameters});"
        lines += textwrap.wrap(prototype, 120, subsequent_indent="    ", break_long_words=False)
    lines += [
        f"void* precast_{name}(void* module, void* const* arguments, std::ptrdiff_t count);"
        for name in boundary.BUILT_INS
    ]
    return "\n".join([*lines, *_EXPORTED[1], ""])


def _cpp(kind: boundary.ValueType) -> str:
    return f"precast::{kind.cpp}" if kind.cpp == "Callback" else kind.cpp


def main() -> int:
    """Write the header, or check it."""
    if "--check" in sys.argv[1:]:
        return int(TARGET.read_text(encoding="utf-8") != header())
    atomic_write.replace(TARGET, header().encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
