"""The files of the policies that ship with precast, by names such as `torch` and `torch@2.11`.

Invariants:
    - A name with a release is the preset for that release of PyTorch, even if another one is installed.
    - An unsupported release is an error that lists the supported ones.
    - PyTorch is not imported here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from precast._internal import torch_versions
from precast._internal.torch_versions import Version
from precast.errors import PolicyError
from precast.policy.values import nearest, shown

__all__ = ["FOLDER", "Preset", "find", "is_preset", "names"]

FOLDER: Final = Path(__file__).parent / "presets"


class Preset(NamedTuple):
    """A file that ships with precast, and the release of PyTorch in the preset's name."""

    path: Path
    release: Version | None = None
    """None is the release of the installed PyTorch."""


def names() -> tuple[str, ...]:
    """Return the names of the policies that ship with precast, without releases."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def find(name: object) -> Preset | None:
    """Return the preset of that name, which may end in a release as in `torch@2.11`; None for other names.

    Raises:
        PolicyError: a preset's name with an unsupported release.
    """
    if not isinstance(name, str):
        return None
    preset, at, release = name.partition("@")
    if preset not in names():
        return None
    return Preset(FOLDER / f"{preset}.toml", _release(preset, release) if at else None)


def is_preset(name: str) -> bool:
    """Return True if `Policy.load` finds a preset with this name."""
    try:
        return find(name) is not None
    except PolicyError:
        return False


def _release(preset: str, text: str) -> Version:
    releases = {torch_versions.spell(version): version for version in torch_versions.supported()}
    if text not in releases:
        hint = nearest(text, list(releases))
        allowed = ", ".join(f"{preset}@{each}" for each in releases)
        raise PolicyError(
            f"{shown(f'{preset}@{text}')}: precast has no rules of PyTorch {shown(text)}{hint} "
            f"Allowed: {allowed}, or {preset} for the installed PyTorch"
        )
    return releases[text]
