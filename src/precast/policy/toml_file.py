"""Policy files: reads the contents of a policy from TOML, and writes them.

Invariants:
    - `[ops]` speaks for every device type, `[ops.cuda]` for one and is laid over `[ops]`.
    - A file is laid over its `base`; a chain of bases may be of any length, and must end.
    - `[modules]` speaks for modules by name; a pattern replaces the same one of the base.
    - `[measured]` is of the file that has it, not of files that have this one as their base: they have other rules.
    - A row for other versions of PyTorch is ignored; in a preset that is pinned to a release, that release counts.
    - Every problem is one `PolicyError` with the file, the line or key, the value, and what is allowed.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, cast

import tomli_w

from precast import _torch
from precast._internal import atomic_write, torch_versions
from precast._internal.torch_versions import Version
from precast.errors import OutputError, PolicyError
from precast.policy import preset_files
from precast.policy.measured import Measured, Value, check_measured
from precast.policy.module_rules import ModuleRule, parse_module_rules
from precast.policy.preset_files import Preset
from precast.policy.rows import (
    DEVICE_TYPES,
    ROW_KEYS,
    Entry,
    Rule,
    canonical,
    overlay,
    parse_entry,
    parse_rows,
    row_in_release,
    short,
    split,
)
from precast.policy.values import (
    check_choice,
    check_mapping,
    check_text,
    clipped,
    nearest,
    shown,
)

__all__ = [
    "MIXED",
    "Contents",
    "Mixed",
    "Modules",
    "Tables",
    "read",
    "render",
    "write",
]

Mixed = Literal["raise", "promote"]
Tables = Mapping[str, Mapping[str, Entry]]
Modules = Mapping[str, ModuleRule]

MIXED = ("raise", "promote")
_KEYS = ("name", "summary", "base", "mixed", "measured", "ops", "modules")


@dataclass(frozen=True)
class Contents:
    """What a policy file and its bases contain."""

    name: str = ""
    summary: str = ""
    mixed: Mixed = "raise"
    tables: Tables = field(default_factory=dict)
    modules: Modules = field(default_factory=dict)
    measured: Measured = field(default_factory=dict)


def read(name_or_path: str | os.PathLike[str], version: Version = _torch.VERSION) -> Contents:
    """The contents of a preset or a file.

    Args:
        name_or_path: which.
        version: the version of PyTorch for which it is read; another one than the installed only to show what it gets.
            A preset that is pinned to a release, as in `torch@2.11`, is read for that one.

    Raises:
        PolicyError: there is no such preset or file, or it is not valid.
    """
    chain = _chain(name_or_path)
    contents = Contents()
    for depth in reversed(range(len(chain))):
        try:
            contents = _laid_over(contents, chain[depth], version)
        except PolicyError as error:
            raise PolicyError(f"{_bases(chain[:depth])}{error}") from error
    return contents


def render(contents: Contents) -> str:
    """The TOML text of a policy, one line an operation; it stands alone, without a base."""
    lines = [_line("name", contents.name), _line("summary", contents.summary)]
    lines.append(_line("mixed", contents.mixed))
    lines += ["", "[measured]"] if contents.measured else []
    lines += [_line(key, value) for key, value in contents.measured.items()]
    shared = _shared_rows(contents.tables)
    lines += _section("[ops]", shared)
    for device, table in contents.tables.items():
        own = {key: entry for key, entry in table.items() if key not in shared}
        lines += _section(f"[ops.{device}]", own)
    lines += ["", "[modules]"] if contents.modules else []
    lines += [_module_row(pattern, rule) for pattern, rule in contents.modules.items()]
    return "\n".join(lines) + "\n"


def write(path: str | os.PathLike[str], text: str) -> None:
    """Puts a text into a file, whole or not at all.

    Raises:
        PolicyError: `path` is no path, or the file cannot be written; this one is an `OSError` too.
    """
    target = Path(_path_text(path, "dump takes the path of a file"))
    try:
        atomic_write.replace(target, text.encode(), make_folders=False)
    except OutputError as error:
        raise _NotWrittenError(error.errno, error.strerror, clipped(str(path))) from error


class _NotWrittenError(OutputError, PolicyError):
    """A policy that could not be written to a file; `OutputError` first, as an `OSError` is made in its own way."""


def _path_text(given: object, takes: str) -> str:
    try:
        path = os.fspath(given)  # type: ignore[call-overload]
    except Exception:  # any: what a path is may be code of its own
        path = None
    if not isinstance(path, str):
        raise PolicyError(f"{shown(given)} is no path: {takes}, as text or a pathlib.Path")
    return path


def _locate(name_or_path: str | os.PathLike[str], folder: Path) -> Preset:
    preset = preset_files.find(name_or_path)
    if preset is not None:
        return preset
    takes = "a policy is the name of a preset or the path of a TOML file"
    given = _path_text(name_or_path, takes)
    path = folder / given
    # `Path.is_file` would raise an error for a name that is too long.
    if not os.path.isfile(path):
        hint = nearest(given, preset_files.names())
        raise PolicyError(
            f"no policy {shown(given)}: neither a preset nor a file{hint} "
            f"Allowed: {', '.join(preset_files.names())}, or the path of a TOML file"
        )
    return Preset(path)


class _Link(NamedTuple):
    """A file, its contents, and the release of PyTorch that it is pinned to: a preset alone can be."""

    path: Path
    document: dict[str, object]
    release: Version | None


def _chain(name_or_path: str | os.PathLike[str]) -> list[_Link]:
    """The file, its base, the base of that ..., each with its contents."""
    chain: list[_Link] = []
    seen: set[Path] = set()
    asked, folder = name_or_path, Path()
    release: Version | None = None
    while True:
        try:
            path, named = _locate(asked, folder)
            release = named or release  # the base of a pinned preset is pinned with it
            _refuse_circle(path, chain, seen)
            document = _parse(path)
            chain.append(_Link(path, document, release))
            if "base" not in document:
                return chain
            asked, folder = _base(document["base"], path), path.parent
        except PolicyError as error:
            raise PolicyError(f"{_bases(chain)}{error}") from error


def _base(base: object, path: Path) -> str:
    if not isinstance(base, str):
        raise PolicyError(f"{path}: base is {shown(base)}; it must be a preset's name or a path")
    return base


def _refuse_circle(path: Path, chain: list[_Link], seen: set[Path]) -> None:
    try:
        real = path.resolve()
    except (OSError, RuntimeError) as error:
        raise PolicyError(f"{path}: cannot be read: {error}") from error
    if real in seen:
        links = " -> ".join(_some([link.path.name for link in chain] + [path.name]))
        raise PolicyError(f"{path}: base: the files lead back to themselves: {links}")
    seen.add(real)


def _bases(chain: list[_Link]) -> str:
    """How the files of a chain led to the one behind it, as the beginning of a message."""
    links = [f"{path}: base = {shown(document['base'])}" for path, document, _ in chain]
    return "".join(f"{link}: " for link in _some(links))


def _some(links: list[str]) -> list[str]:
    if len(links) <= 6:
        return links
    return [*links[:3], f"({len(links) - 5} files more)", *links[-2:]]


def _laid_over(base: Contents, link: _Link, version: Version) -> Contents:
    path, document, release = link
    at = f"@{torch_versions.spell(release)}" if release else ""
    mixed = document.get("mixed", base.mixed)
    modules = check_mapping(document.get("modules", {}), f"{path}: modules", "the table [modules]")
    return Contents(
        name=check_text(document.get("name", path.stem), f"{path}: name") + at,
        summary=check_text(document.get("summary", ""), f"{path}: summary"),
        mixed=cast("Mixed", check_choice(mixed, MIXED, f"{path}: mixed is ")),
        tables=_tables(document.get("ops", {}), base.tables, link, version),
        modules={**base.modules, **parse_module_rules(modules, f"{path}: [modules]", version)},
        measured=check_measured(document.get("measured", {}), f"{path}: [measured]"),
    )


def _parse(path: Path) -> dict[str, object]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path}: cannot be read: {error}") from error
    except RecursionError:
        raise PolicyError(
            f"{path}: cannot be read: its values are nested too deep; a row is at most a table in a table"
        ) from None
    except ValueError as error:  # tomllib.TOMLDecodeError, and a number with too many digits
        raise PolicyError(f"{path}: not TOML: {clipped(str(error))}") from error
    for key in document:
        if key not in _KEYS:
            raise PolicyError(
                f"{path}: unknown key {shown(key)}{nearest(key, _KEYS)} Allowed: {', '.join(_KEYS)}"
            )
    return document


def _tables(ops: object, base: Tables, link: _Link, version: Version) -> Tables:
    ops = check_mapping(ops, f"{link.path}: ops", "the table [ops] or [ops.cuda]")
    general = {key: value for key, value in ops.items() if key not in DEVICE_TYPES}
    shared = _rows(general, link, "[ops]", version)
    tables = {}
    for device in DEVICE_TYPES:
        own = _rows(ops.get(device, {}), link, f"[ops.{device}]", version)
        table = base.get(device, {})
        for rows in filter(None, (shared, own)):  # most files have none for most device types
            table = overlay(table, rows)
        if table:
            tables[device] = table
    return tables


def _rows(table: object, link: _Link, section: str, version: Version) -> dict[str, Entry]:
    path = link.path
    table = check_mapping(table, f"{path}: {section}", "a table of rules")
    is_preset = path.parent == preset_files.FOLDER
    section = f"{path.name if is_preset else path}: {section}"
    known: set[str] = set()
    for name, value in table.items():
        where = f"{section} {clipped(name)}"
        _refuse_device_typo(name, value, where)
        key = canonical(name, where)
        if key in known:
            raise PolicyError(f"{where}: the same operation is already in this table as {key}")
        known.add(key)
    if link.release is not None:
        return _rows_in_release(table, section, link.release)
    return parse_rows(table, section, version, check=not is_preset)


def _rows_in_release(
    table: Mapping[str, object], section: str, release: Version
) -> dict[str, Entry]:
    """The rows of a preset that is pinned to a release of PyTorch, as they are to be followed on the installed one."""
    written = {
        canonical(name): parse_entry(value, f"{section} {name}") for name, value in table.items()
    }
    found = {key: row_in_release(key, entry, release) for key, entry in written.items()}
    return {key: entry for key, entry in found.items() if entry is not None}


def _refuse_device_typo(name: str, value: object, where: str) -> None:
    hint = nearest(name, DEVICE_TYPES)
    if isinstance(value, Mapping) and "rule" not in value and hint != ".":
        allowed = ", ".join(DEVICE_TYPES)
        raise PolicyError(f"{where}: {shown(name)} is not a device type{hint} Allowed: {allowed}")


def _shared_rows(tables: Tables) -> dict[str, Entry]:
    """The rows that are the same for every device type, taken operation by operation."""
    by_device = [_by_operation(tables.get(device, {})) for device in DEVICE_TYPES]
    first, *others = by_device
    return {
        key: entry
        for operation, rows in first.items()
        if all(other.get(operation) == rows for other in others)
        for key, entry in rows.items()
    }


def _by_operation(table: Mapping[str, Entry]) -> dict[str, dict[str, Entry]]:
    groups: dict[str, dict[str, Entry]] = {}
    for key, entry in table.items():
        groups.setdefault(split(key)[0], {})[key] = entry
    return groups


def _section(heading: str, table: Mapping[str, Entry]) -> list[str]:
    lines = ["", heading] if table else []
    for rule in Rule:
        rows = sorted((key, entry) for key, entry in table.items() if entry.rule is rule)
        lines += [f"# {rule.meaning}"] if rows else []
        lines += [_row(key, entry) for key, entry in rows]
    return lines


def _row(key: str, entry: Entry) -> str:
    if entry == Entry(entry.rule):
        return _line(short(key), entry.rule)
    parts = {name: getattr(entry, name) for name in ROW_KEYS}
    given = [_line(name, value) for name, value in parts.items() if value]
    # tomli_w writes a table over several lines; a row is one line.
    return _line(short(key), "").removesuffix('""') + "{ " + ", ".join(given) + " }"


def _module_row(pattern: str, rule: ModuleRule) -> str:
    dtype, ops = rule.dtype or rule.float8, rule.ops
    if rule.float8:  # the name stands for rows that it gives the same reason
        ops = {key: entry for key, entry in ops.items() if entry != Entry(rule.float8)}
    given = [_line("dtype", dtype)] if dtype else []
    if len(given) == 1 and not ops and not rule.reason:
        return _line(pattern, str(dtype))
    if ops:
        rows = ", ".join(_row(key, entry) for key, entry in ops.items())
        given.append(f"ops = {{ {rows} }}")
    given += [_line("reason", rule.reason)] if rule.reason else []
    return _line(pattern, "").removesuffix('""') + "{ " + ", ".join(given) + " }"


def _line(key: str, value: Value) -> str:
    plain = str(value) if isinstance(value, str) else value  # the name of a rule is more than text
    return tomli_w.dumps({key: plain}).rstrip("\n")
