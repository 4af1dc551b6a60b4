"""The wheel and the source distribution: what is in them, and that the wheel works where the source tree is not.

Both are made by `python -m build` without a network, the wheel out of the source distribution. `make test-package`
installs them with all that they depend on (tests/package).
"""

from __future__ import annotations

import email
import functools
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

import precast

ROOT = Path(__file__).parents[2]
LINT = ROOT / "lint"
INFO = f"precast-{precast.__version__}.dist-info"
MAY_SHIP = (
    "precast/*.py",  # `*` fits a slash, too
    "precast/py.typed",
    "precast/policy/presets/*.toml",
    "precast/weights/native/*.cpp",
    "precast/weights/native/*.h",
    "precast/comparison/*.jinja",
    "precast/report/assets/*.jinja",
    "precast/report/assets/*.css",
    "precast/report/assets/*.js",
    "precast/tuning/assets/*.jinja",
    "precast/tuning/assets/*.css",
    "precast/tuning/assets/*.js",
)
ABOUT_ITSELF = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")


class Built(NamedTuple):
    """The two files that `python -m build` makes."""

    wheel: Path
    sdist: Path


def build(source: Path, out: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *arguments]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def made(out: Path, source: Path = ROOT) -> Built:
    build(source, out)
    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    return Built(wheel, sdist)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return made(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The distribution `precast-lint`."""
    return made(tmp_path_factory.mktemp("lint"), LINT)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@functools.cache
def source_tree(source: Path = ROOT / "src") -> dict[str, bytes]:
    files = (path for path in source.rglob("*") if path.is_file())
    made = {"__pycache__", "compiled"}  # by Python, and by `make`
    kept = (path for path in files if made.isdisjoint(path.parts))
    return {path.relative_to(source).as_posix(): path.read_bytes() for path in kept}


def unwanted(names: Iterable[str]) -> list[str]:
    """Files that do not belong into the wheel."""
    return [name for name in names if not any(fnmatch(name, kind) for kind in MAY_SHIP)]


def test_the_wheel_is_the_source_tree_and_nothing_else(built: Built) -> None:
    shipped = contents(built.wheel)
    assert sorted(n for n in shipped if n.startswith(INFO)) == [f"{INFO}/{n}" for n in ABOUT_ITSELF]
    package = {name: data for name, data in shipped.items() if not name.startswith(INFO)}
    assert package == source_tree()
    assert unwanted(package) == []


def test_the_wheel_of_the_checker_is_its_source_tree_and_needs_what_it_says(checker: Built) -> None:
    shipped = contents(checker.wheel)
    [about] = [data for name, data in shipped.items() if name.endswith(".dist-info/METADATA")]
    package = {name: data for name, data in shipped.items() if ".dist-info/" not in name}
    assert package == source_tree(LINT / "src")
    assert [n for n in package if not fnmatch(n, "precast_lint/*.py")] == ["precast_lint/py.typed"]
    required = email.message_from_string(about.decode()).get_all("Requires-Dist", [])
    always = {r.name for r in map(Requirement, required) if r.marker is None}
    assert always == {"click", "libcst"}


@pytest.mark.parametrize(
    "name",
    [
        "precast/notes.md",
        "precast/policy/presets/default.toml.orig",
        "precast/report/assets/page.png",
        "precast/__pycache__/region.cpython-311.pyc",
        "tests/project/test_package.py",
        "examples/01_gradients.py",
    ],
)
def test_what_has_no_place_in_the_wheel_is_seen(name: str) -> None:
    assert unwanted([*source_tree(), name]) == [name]


def test_no_kind_of_file_is_allowed_that_is_not_there() -> None:
    assert [kind for kind in MAY_SHIP if not any(fnmatch(n, kind) for n in source_tree())] == []


def test_the_source_tree_and_the_source_distribution_make_the_same_wheel(
    built: Built, tmp_path: Path
) -> None:
    build(ROOT, tmp_path, "--wheel")
    [straight] = tmp_path.glob("*.whl")
    assert straight.name == built.wheel.name
    assert straight.read_bytes() == built.wheel.read_bytes()


def test_the_source_distribution_has_what_the_tests_and_pages_need(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("this source tree is no clone, so which files are part of it is not known")
    there = {name for name in tracked.stdout.splitlines() if (ROOT / name).exists()}
    assert there - inside == set()


def test_the_wheel_says_what_it_is(built: Built) -> None:
    shipped = contents(built.wheel)
    about = email.message_from_string(shipped[f"{INFO}/METADATA"].decode())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (about["Name"], about["Version"]) == ("precast", precast.__version__)
    assert about["Requires-Python"] == project["requires-python"]
    required = map(Requirement, about.get_all("Requires-Dist", []))
    always = {r for r in required if "extra" not in str(r.marker)}
    assert always == set(map(Requirement, project["dependencies"]))
    assert about.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    assert b"precast = precast.cli.main:main" in shipped[f"{INFO}/entry_points.txt"]


def test_the_extra_all_has_every_extra_but_those_of_trainers(
    built: Built,
) -> None:
    about = email.message_from_string(contents(built.wheel)[f"{INFO}/METADATA"].decode())
    extras = set(about.get_all("Provides-Extra", []))
    trainers = {"lightning", "accelerate", "transformers", "ignite", "wandb"}  # and a service
    work = {"dev", "docs", "test", "test-browser", "test-clients"}
    required = [Requirement(text) for text in about.get_all("Requires-Dist", [])]

    def brought_by(extra: str) -> set[str]:
        return {r.name for r in required if r.marker and r.marker.evaluate({"extra": extra})}

    always = brought_by("")
    expected = {name for extra in extras - trainers - work for name in brought_by(extra)}
    assert brought_by("all") == expected | always > always
    assert not {"lightning", "accelerate", "transformers", "pytorch-ignite"} & expected


# --- installed ---


@pytest.fixture(scope="module")
def installed(built: Built, checker: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with these wheels; what they depend on is taken from this one.

    A folder named in a `.pth` file is searched last, and no `.pth` file inside is read: the source tree, which is
    installed in this environment by such a file, is out of reach.
    """
    folder = tmp_path_factory.mktemp("installed")
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder)
    programs = folder / "bin"
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    python = str(programs / "python")
    wheels = [str(built.wheel), str(checker.wheel)]
    run([sys.executable, "-m", "pip", "--python", python, *install, *wheels], folder)
    site = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder)
    others = Path(site.strip()) / "others.pth"
    others.write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return programs


def run(command: list[str], folder: Path, *, code: int = 0) -> str:
    """Return the output of a program that does not see the source tree."""
    environment = {n: v for n, v in os.environ.items() if n not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_the_installed_command_answers_and_checks(installed: Path, tmp_path: Path) -> None:
    command = str(installed / "precast")
    assert run([command, "--version"], tmp_path) == f"precast, version {precast.__version__}\n"
    old = tmp_path / "old.py"
    old.write_text("import torch\n\nwith torch.cuda.amp.autocast():\n    pass\n")
    assert "AMP001" in run([command, "check", "old.py"], tmp_path, code=1)
    run([str(installed / "precast-lint"), "check", "--fix", "old.py"], tmp_path)
    assert 'torch.amp.autocast("cuda")' in old.read_text(encoding="utf-8")


_USE = """
import sys
from importlib import import_module, metadata
from pathlib import Path

import torch

import precast
import precast.cli.demo.display
from precast import report
from tests.support.documents import document

home = Path(precast.__file__).parent
assert home.is_relative_to(sys.prefix), home
assert metadata.version("precast") == precast.__version__
for name in precast.__all__:
    getattr(precast, name)
assert {n for n, m in sys.modules.items() if n.startswith("precast") and m.__file__ is not None
    and not Path(m.__file__).is_relative_to(home)} == set()
for name in ("torch", "default", "lean"):
    assert precast.Policy.load(name).tables
with precast.autocast("cpu", dtype=torch.bfloat16):
    assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is torch.bfloat16
report.write(document(layers=1, steps=2), Path("report.html"))
assert "<script" in Path("report.html").read_text(encoding="utf-8")
print(home)
"""


def test_the_installed_package_works(installed: Path, tmp_path: Path) -> None:
    support = tmp_path / "tests" / "support"
    support.mkdir(parents=True)
    (support / "documents.py").symlink_to(ROOT / "tests" / "support" / "documents.py")
    (tmp_path / "use.py").write_text(_USE, encoding="utf-8")
    home = run([str(installed / "python"), "-W", "error", "use.py"], tmp_path).strip()
    assert Path(home).is_relative_to(installed.parent)
