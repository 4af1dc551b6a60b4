"""The layout shows the architecture: packages import downwards only, private PyTorch API has one place.

The contracts are import-linter's, in `pyproject.toml`; the page `docs/architecture.md` shows the same packages.

What is private: a name in torch that begins with one underscore, however it is reached (an import,
`torch.x._y`, `getattr(torch, "_y")`), and an attribute with such a name on anything but `self` or
`cls`, unless the same file defines it. Text is not looked into.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "precast"
SOURCES = sorted(PACKAGE.rglob("*.py"))
OTHERS = ("benchmarks/*.py", "lint/src/**/*.py", "tools/**/*.py")
CHECKED = sorted([*SOURCES, *(path for pattern in OTHERS for path in ROOT.glob(pattern))])

# Private names that a file other than those of _torch may use: (file, name) -> why.
ALLOWED: dict[tuple[str, str], str] = {}


def _id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _module(path: Path) -> str:
    """`src/precast/cli/demo/display.py` -> `cli.demo.display`; the package itself is `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_packages_import_downwards_and_their_modules_in_one_direction() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def _layers() -> list[str]:
    """The packages, the highest first, as import-linter's contract lists them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    [layers] = [c["layers"] for c in contracts if c.get("containers") == ["precast"]]
    return list(layers)


def _entries() -> list[str]:
    return sorted(p.name for p in PACKAGE.iterdir() if p.name != "__pycache__")


def test_the_page_shows_the_packages_in_the_order_that_is_checked() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```text\nsrc/precast/\n(.*?)```", page, re.S)
    shown = re.findall(r"^  ([\w.]+)/? ", block, re.M)
    assert sorted(shown) == _entries()
    assert [name for name in map(_stem, shown) if name in _layers()] == _layers()


def _stem(entry: str) -> str:
    return entry.removesuffix(".py")


def test_the_packages_can_be_seen_at_a_glance() -> None:
    """Seventeen packages, the package itself, and the public modules errors, events, fsdp."""
    assert len([name for name in _entries() if name not in ("__main__.py", "py.typed")]) <= 21


def test_a_drawing_of_the_packages_has_at_most_ten_floors() -> None:
    """A floor is a package that imports from the one below it; single files, such as errors.py, are none."""
    graph = grimp.build_graph("precast", cache_dir=None)
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    below: dict[str, set[str]] = {package: set() for package in packages}
    for module in graph.modules:
        package, *_ = [*module.split(".")[1:], ""]
        for imported in graph.find_modules_directly_imported_by(module):
            other, *_ = [*imported.split(".")[1:], ""]
            if {package, other} <= packages and package != other:
                below[package].add(other)

    @functools.cache
    def chain(package: str) -> tuple[str, ...]:
        return (package, *max(map(chain, below[package]), key=len, default=()))

    longest = max(map(chain, packages), key=len)
    assert len(longest) <= 10, " -> ".join(longest)


def test_no_module_is_named_as_a_public_callable() -> None:
    """Importing it would put the module in the callable's place."""
    import precast

    callables = {name for name in precast.__all__ if callable(getattr(precast, name))}
    assert not callables & {
        path.parent.name if path.stem == "__init__" else path.stem for path in SOURCES
    }


# --- private PyTorch API ---


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.relative_to(PACKAGE).parts[0] != "_torch"], ids=_id
)
def test_private_torch_names_live_in_one_package(path: Path) -> None:
    result = {name for name in _private(_tree(path)) if (path.name, name) not in ALLOWED}
    assert not result, f"{_id(path)} uses {sorted(result)}: give it a door in _torch"


def test_every_allowed_private_name_is_still_used() -> None:
    used = {(path.name, name) for path in SOURCES for name in _private(_tree(path))}
    assert set(ALLOWED) <= used


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch._C", "torch._C"),
        ("import torch._C as c", "torch._C"),
        ("from torch import _C", "torch._C"),
        ("from torch._ops import OpOverload", "torch._ops"),
        ("import torch\ntorch._C.f()", "torch._C"),
        ("import torch\ntorch.utils._pytree.f()", "torch.utils._pytree"),
        ("from torch import utils as u\nu._pytree.f()", "torch.utils._pytree"),
        ("import torch.nn as nn\nnn.modules._functions", "torch.nn.modules._functions"),
        ("from torch import Tensor\nTensor._make_subclass()", "torch.Tensor._make_subclass"),
        ("import torch\ngetattr(torch, '_C')", "torch._C"),
        ("def f(t):\n    return t._version", "_version"),
    ],
)
def test_a_private_name_is_seen(text: str, name: str) -> None:
    assert list(_private(ast.parse(text))) == [name]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.__version__",
        "from precast import _torch\n_torch.version_of",
        "class A:\n    def f(self):\n        return self._x",
        "class A:\n    _x: int\ndef f(a):\n    return a._x",
    ],
)
def test_other_underscores_are_none_of_its_business(text: str) -> None:
    assert list(_private(ast.parse(text))) == []


def _private(tree: ast.Module) -> Iterator[str]:
    aliases = _names_of_torch(tree)
    own = _defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            chains = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            chains = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            chains = [_chain(node, aliases)]
            if not chains[0] and _is_private(node.attr) and _is_foreign(node, own):
                yield node.attr
        elif isinstance(node, ast.Call):
            chains = [_asked_by_name(node, aliases)]
        else:
            continue
        for chain in chains:
            first = _up_to_private(chain)
            if chain.startswith("torch.") and first:
                yield first


def _names_of_torch(tree: ast.Module) -> dict[str, str]:
    """Return the full name of each name that a file imports from torch."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                target = alias.name if alias.asname else alias.name.partition(".")[0]
                names[alias.asname or target] = target
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return {name: target for name, target in names.items() if target.split(".")[0] == "torch"}


def _chain(node: ast.expr, aliases: dict[str, str]) -> str:
    """`F.x._y` -> `torch.nn.functional.x._y`; the inner links of a chain, and others, are empty.

    A chain ends at its first private link, so that it is found once.
    """
    links: list[str] = []
    inner: ast.expr = node
    while isinstance(inner, ast.Attribute):
        links.append(inner.attr)
        inner = inner.value
    if not isinstance(inner, ast.Name) or inner.id not in aliases or not _is_private(links[0]):
        return ""
    return ".".join([aliases[inner.id], *reversed(links)])


def _asked_by_name(node: ast.Call, aliases: dict[str, str]) -> str:
    """`getattr(torch.x, "_y")` as the chain that it is."""
    match node:
        case ast.Call(
            func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]
        ) if _is_private(name):
            return _chain(ast.Attribute(value, name, ast.Load()), aliases)
    return ""


def _up_to_private(chain: str) -> str:
    """`torch._C.f` -> `torch._C`; empty where nothing is private."""
    links = chain.split(".")
    private = [i for i, link in enumerate(links) if _is_private(link)]
    return ".".join(links[: private[0] + 1]) if private else ""


def _is_private(name: str) -> bool:
    """`_replace` is a documented method of named tuples."""
    return name.startswith("_") and not name.startswith("__") and name != "_replace"


def _is_foreign(node: ast.Attribute, own: set[str]) -> bool:
    owner = node.value.id if isinstance(node.value, ast.Name) else ""
    return owner not in {"self", "cls", "precast"} and node.attr not in own


def _defined(tree: ast.Module) -> set[str]:
    """The names that a file gives to attributes and functions of its own."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Attribute(attr=name, value=ast.Name(id="self"), ctx=ast.Store()):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
    return names


# --- files ---


@pytest.mark.parametrize("path", CHECKED, ids=_id)
def test_a_file_is_short_and_says_what_it_is(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 600, (
        "is it still one idea? Put what is another one into a file of its own"
    )
    docstring = ast.get_docstring(_tree(path)) or ""
    assert re.match(r".+?[.:](\s|$)", docstring, re.S), "begin with a sentence on what the file is"


# --- what loads torch ---


@pytest.mark.parametrize(
    "code",
    [
        "import precast",
        "import precast; precast.errors.PolicyError, precast.events, precast.observe",
        "import precast.cli.main",
        "from precast.cli.main import main; main(['--help'], standalone_mode=False)",
        "from precast.cli.main import main; main(['demo', '--help'], standalone_mode=False)",
        "from precast.cli.main import main; main(['doctor', '--help'], standalone_mode=False)",
        "from precast.cli.main import main; main(['run', '--help'], standalone_mode=False)",
        "import precast.running.session, precast.report",
        "from precast.cli.main import main; main(['--version'], standalone_mode=False)",
    ],
)
def test_torch_is_loaded_when_it_is_needed(code: str) -> None:
    check = f"import sys; {code}; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr or "torch was imported"


def test_an_import_loads_nothing_but_what_is_used() -> None:
    """On top of PyTorch: two files; with all public names, no package but the one that writes policy files."""
    code = (
        "import sys, torch; before = set(sys.modules); import precast\n"
        "print(*sorted(set(sys.modules) - before))\n"
        "for name in precast.__all__: getattr(precast, name)\n"
        "tops = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "print(*sorted(tops - sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert done == "precast precast._internal precast._internal.version\nprecast tomli_w\n"
