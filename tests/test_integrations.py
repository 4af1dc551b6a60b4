"""Doors to other libraries: without its library each says what to install, and none is opened unasked.

What they do is tested beside the libraries, in `tests/clients/`.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOORS = {  # file -> the library without which it cannot be loaded
    "lightning": "lightning",
    "transformers": "transformers",
    "ignite": "ignite",
}


@pytest.mark.parametrize(("name", "library"), DOORS.items())
def test_without_its_library_a_door_says_what_to_install(name: str, library: str) -> None:
    program = f"""
import sys
sys.modules[{library!r}] = None
try:
    import precast.integrations.{name}
except ImportError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("MissingExtraError ")
    assert f"pip install 'precast[{name}]'" in done.stdout


def test_every_door_has_an_extra_of_its_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    doors = {path.stem for path in (ROOT / "src/precast/integrations").glob("[a-z]*.py")}
    assert doors <= set(project["optional-dependencies"])
    assert set(DOORS) <= doors


@pytest.mark.parametrize(
    "door", ["precast", "precast.integrations", "precast.integrations.accelerate"]
)
def test_no_library_is_loaded_unasked(door: str) -> None:
    program = f"""
import sys, {door}
loaded = {{"accelerate", "ignite", "lightning", "tensorboard", "transformers"}} & set(sys.modules)
sys.exit(str(loaded) if loaded else 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
