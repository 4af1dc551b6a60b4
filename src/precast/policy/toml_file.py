"""Policy files: reads a policy from TOML, and writes it.

Invariants:
    - `[ops]` applies to every device type; `[ops.cuda]` to one, where its rows replace those of `[ops]`.
    - The rows of a file replace those of its `base`, which may have a base in turn.
    - `[modules]` has rules for modules by name; a pattern replaces the same one of the base.
    - `[measured]` applies to the file itself, not to files with it as their base: they have other rules.
    - A row for other versions of PyTorch is ignored; a preset that is pinned to a release is read for that release.
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
from precast.policy.values import check_choice, check_mapping, check_text, clipped, nearest, shown

__all__ = ["MIXED", "Mixed", "Modules", "PolicyContents", "Tables", "read", "render", "write"]

Mixed = Literal["raise", "promote"]
Tables = Mapping[str, Mapping[str, Entry]]
Modules = Mapping[str, ModuleRule]

MIXED = ("raise", "promote")
_MOST_FILES = 32  # in a chain of bases
_KEYS = ("name", "summary", "base", "mixed", "measured", "ops", "modules")


@dataclass(frozen=True)
class PolicyContents:
    """The contents of a policy file and its bases."""

    name: str = ""
    summary: str = ""
    mixed: Mixed = "raise"
    tables: Tables = field(default_factory=dict)
    modules: Modules = field(default_factory=dict)
    measured: Measured = field(default_factory=dict)


def read(name_or_path: str | os.PathLike[str], version: Version = _torch.VERSION) -> PolicyContents:
    """Return the contents of a preset or a file.

    Raises:
        PolicyError: there is no such preset or file, or it is not valid.
    """
    return _read(name_or_path, Path(), None, (), version)


def render(contents: PolicyContents) -> str:
    """Return the TOML text of a policy without a base, one line for each operation."""
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
    """Write a text to a file, completely or not at all.

    Raises:
        PolicyError: `path` is not a path, or the file cannot be written; the latter is an `OSError` too.
    """
    target = Path(_path_text(path, "save takes the path of a file"))
    try:
        atomic_write.replace(target, text.encode(), make_folders=False)
    except OutputError as error:
        raise _NotWrittenError(error.errno, error.strerror, clipped(str(path))) from error


class _NotWrittenError(OutputError, PolicyError):
    """A failure to write a policy file; `OutputError` is the first base because `OSError` has its own constructor."""


def _path_text(value: object, expected: str) -> str:
    try:
        path = os.fspath(value)  # type: ignore[call-overload]
    except Exception:  # any: `__fspath__` is the value's own code
        path = None
    if not isinstance(path, str):
        raise PolicyError(f"{shown(value)} is not a path: {expected}, as text or a pathlib.Path")
    return path


def _locate(name_or_path: str | os.PathLike[str], folder: Path) -> Preset:
    preset = preset_files.find(name_or_path)
    if preset is not None:
        return preset
    text = _path_text(name_or_path, "a policy is the name of a preset or the path of a TOML file")
    path = folder / text
    # `Path.is_file` would raise an error for a name that is too long.
    if not os.path.isfile(path):
        hint = nearest(text, preset_files.names())
        raise PolicyError(
            f"no policy {shown(text)}: neither a preset nor a file{hint} "
            f"Allowed: {', '.join(preset_files.names())}, or the path of a TOML file"
        )
    return Preset(path)


class _Link(NamedTuple):
    """A file, its contents, and the release of PyTorch that it is pinned to (presets only)."""

    path: Path
    document: dict[str, object]
    release: Version | None


def _read(
    target: str | os.PathLike[str],
    folder: Path,
    release: Version | None,
    outer: tuple[Path, ...],
    version: Version,
) -> PolicyContents:
    """Return the contents of a file and its bases; `outer` are the files of which it is a base."""
    path, own_release = _locate(target, folder)
    release = own_release or release  # the base of a pinned preset is pinned with it
    files = (*outer, path.resolve())
    if files[-1] in outer:
        links = " -> ".join(each.name for each in files)
        raise PolicyError(f"{path}: base: the files form a circle: {links}")
    if len(files) > _MOST_FILES:
        raise PolicyError(f"{path}: it is the base of a base ... of {_MOST_FILES} files")
    link, contents = _Link(path, _parse(path), release), PolicyContents()
    if "base" in link.document:
        base = link.document["base"]
        if not isinstance(base, str):
            raise PolicyError(
                f"{path}: base is {shown(base)}; it must be a preset's name or a path"
            )
        try:
            contents = _read(base, path.parent, release, files, version)
        except PolicyError as error:
            raise PolicyError(f"{path}: base = {shown(base)}: {error}") from error
    return _overlaid(contents, link, version)


def _overlaid(base: PolicyContents, link: _Link, version: Version) -> PolicyContents:
    path, document, release = link
    at = f"@{torch_versions.spell(release)}" if release else ""
    mixed = document.get("mixed", base.mixed)
    modules = check_mapping(document.get("modules", {}), f"{path}: modules", "the table [modules]")
    return PolicyContents(
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
    keys: set[str] = set()
    for name, value in table.items():
        where = f"{section} {clipped(name)}"
        _refuse_device_typo(name, value, where)
        key = canonical(name, where)
        if key in keys:
            raise PolicyError(f"{where}: the same operation is already in this table as {key}")
        keys.add(key)
    if link.release is not None:
        return _rows_in_release(table, section, link.release)
    return parse_rows(table, section, version, check=not is_preset)


def _rows_in_release(
    table: Mapping[str, object], section: str, release: Version
) -> dict[str, Entry]:
    """Return the rows to follow on the installed PyTorch for a preset that is pinned to a release."""
    rows = {
        key: row_in_release(key, parse_entry(value, f"{section} {name}"), release)
        for name, value in table.items()
        for key in [canonical(name)]
    }
    return {key: entry for key, entry in rows.items() if entry is not None}


def _refuse_device_typo(name: str, value: object, where: str) -> None:
    hint = nearest(name, DEVICE_TYPES)
    if isinstance(value, Mapping) and "rule" not in value and hint != ".":
        allowed = ", ".join(DEVICE_TYPES)
        raise PolicyError(f"{where}: {shown(name)} is not a device type{hint} Allowed: {allowed}")


def _shared_rows(tables: Tables) -> dict[str, Entry]:
    """Return the rows that are the same for every device type, compared operation by operation."""
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
    fields = [_line(name, value) for name, value in parts.items() if value]
    # tomli_w writes a table over several lines; a row is one line.
    return _line(short(key), "").removesuffix('""') + "{ " + ", ".join(fields) + " }"


def _module_row(pattern: str, rule: ModuleRule) -> str:
    dtype, ops = rule.dtype or rule.product_rule, rule.ops
    if rule.product_rule:  # the name includes these rows, unless they have another reason
        ops = {key: entry for key, entry in ops.items() if entry != Entry(rule.product_rule)}
    fields = [_line("dtype", dtype)] if dtype else []
    if len(fields) == 1 and not ops and not rule.reason:
        return _line(pattern, str(dtype))
    if ops:
        rows = ", ".join(_row(key, entry) for key, entry in ops.items())
        fields.append(f"ops = {{ {rows} }}")
    fields += [_line("reason", rule.reason)] if rule.reason else []
    return _line(pattern, "").removesuffix('""') + "{ " + ", ".join(fields) + " }"


def _line(key: str, value: Value) -> str:
    plain = str(value) if isinstance(value, str) else value  # tomli_w refuses a Rule
    return tomli_w.dumps({key: plain}).rstrip("\n")
