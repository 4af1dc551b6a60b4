"""AMP109: a test of PyTorch's version that is wrong for some version."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator

from precast_lint.meaning.guards import is_version_test
from precast_lint.meaning.version_tests import SINCE, VersionTest, version_test
from precast_lint.meaning.version_values import holds, names_releases
from precast_lint.meaning.versions import minor_kind, value_given, version_kind
from precast_lint.model import Applicability, Case, Finding, Fix, Rule, Severity, version
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted, walk
from precast_lint.torch_versions import MINORS

__all__ = ["RULE"]

_RELEASES = tuple(f"{minor}.0" for minor in MINORS)
_MENTIONED = re.compile(
    r"torch\.(cuda\.|cpu\.)?amp\.\w+|torch\.autocast|torch\.[gs]et_autocast_dtype"
)
_AS_TEXT = "this compares versions as texts: it is wrong for PyTorch {found}"
_TOO_EARLY = "`{name}` is there from PyTorch {since}; this lets {found} through"
_GAP = "this holds otherwise for PyTorch {found} than for {first}, which is older: compare whole versions"


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each test under which AMP is used and that is wrong for some release."""
    releases = [
        r for r in _RELEASES if source.min_torch is None or version(r) >= version(source.min_torch)
    ]
    statements: list[cst.If | cst.IfExp] = [*source.all(cst.If), *source.all(cst.IfExp)]
    for statement in statements:
        test = version_test(source, statement.test)
        if test is None:
            yield from _of_parts(source, statement, releases)
            continue
        wrong = [r for r in releases if test.holds(r) != test.right(r)]
        if not wrong:
            yield from _too_early(source, statement, test.holds, releases, test)
        elif any(_mentions(source, statement)):
            message = _AS_TEXT.format(found=_listed(wrong))
            yield source.find(RULE, statement.test, message)


def _of_parts(
    source: Source, statement: cst.If | cst.IfExp, releases: list[str]
) -> Iterator[Finding]:
    """What is wrong with a test that is computed for each release: it has several parts, or compares parts of texts."""
    if any(_is_about_version(source, outer) for outer in source.around(statement)):
        return
    test = value_given(source, statement.test)
    found: dict[str, bool] = {}
    for release in ("0.0.0", *releases):  # most tests are not about versions, which the first says
        is_through = holds(source, test, release)
        if is_through is None:
            return
        found[release] = is_through
    older = found.pop("0.0.0")  # whether it asks for older versions
    first = next((release for release in releases if found[release] is not older), None)
    if first is None:
        return
    wrong = [r for r in releases[releases.index(first) :] if found[r] is older]
    if not wrong or names_releases(source, test):
        yield from _too_early(source, statement, lambda release: found[release], releases)
    elif any(_mentions(source, statement)):
        message = _GAP.format(found=_listed(wrong), first=_listed([first]))
        yield source.find(RULE, statement.test, message)


def _is_about_version(source: Source, outer: Node) -> bool:
    """Whether a test around another one looks at PyTorch's version, too."""
    if not isinstance(outer, (cst.If, cst.IfExp)):
        return False
    return any(
        version_kind(source, n.left) is not None or minor_kind(source, n.left) is not None
        for n in walk(outer.test)
        if isinstance(n, cst.Comparison)
    )


def _too_early(
    source: Source,
    statement: cst.If | cst.IfExp,
    lets_through: Callable[[str], bool | None],
    releases: list[str],
    test: VersionTest | None = None,
) -> Iterator[Finding]:
    """A finding for the newest name that a branch uses in releases which do not have it."""
    branches = ((statement.body, True), (statement.orelse, False))
    used = [(n, taken) for part, taken in branches if part for n in _names(source, statement, part)]
    late = {(name, taken) for name, taken in used if name in SINCE}
    for name, taken in sorted(late, key=lambda pair: version(SINCE[pair[0]]), reverse=True):
        since = version(SINCE[name])
        wrong = [r for r in releases if lets_through(r) is taken and version(r) < since]
        if not wrong:
            continue
        fix = _fix(source, test, taken, SINCE[name]) if test is not None else None
        message = _TOO_EARLY.format(name=name, since=SINCE[name], found=_listed(wrong))
        yield source.find(RULE, statement.test, message, fix)
        return


def _fix(source: Source, test: VersionTest, taken: bool, since: str) -> Fix | None:
    """The version that has the name, in the place of the one that is asked for."""
    is_bound = test.compare in (operator.ge, operator.lt) and (test.compare is operator.ge) is taken
    if test.bound is None or not is_bound:
        return None
    if isinstance(test.bound, cst.Tuple):
        text = f"({', '.join(since.split('.'))})"
        edit = source.replace(test.bound, text if not test.bound.lpar else text[1:-1])
    else:
        edit = source.replace(
            test.bound, re.sub(r"\d[\w.+]*", since, source.code(test.bound), count=1)
        )
    return source.fix(f"Ask for PyTorch {since}", edit, unsafe=True)


def _listed(releases: list[str]) -> str:
    short = [release.removesuffix(".0") for release in releases]
    return short[0] if len(short) == 1 else f"{short[0]} to {short[-1]}"


# --- what is under it ---


def _names(source: Source, statement: Node, part: Node) -> Iterator[str]:
    """The names of AMP in a branch that no other test of what PyTorch has is around."""
    for node in walk(part):
        name = None
        if isinstance(node, (cst.Name, cst.Attribute)):
            name = source.names.path(node)
        elif isinstance(node, cst.ImportAlias):
            outer = source.parents.get(node)
            module = dotted(outer.module) if isinstance(outer, cst.ImportFrom) else None
            name = f"{module}.{dotted(node.name)}" if module else None
        if (
            name is not None
            and _MENTIONED.fullmatch(name)
            and not _is_guarded_within(source, node, statement)
        ):
            yield name


def _mentions(source: Source, statement: cst.If | cst.IfExp) -> Iterator[bool]:
    for part in (statement.body, statement.orelse):
        if part is not None:
            yield any(True for _ in _names(source, statement, part))


def _is_guarded_within(source: Source, node: Node, statement: Node) -> bool:
    for outer in source.around(node):
        if outer is statement:
            return False
        if isinstance(outer, cst.Try):
            return True
        if isinstance(outer, (cst.If, cst.IfExp)) and is_version_test(source, outer.test):
            return True
    return False


VALID = (
    Case("""
        import torch
        from packaging import version

        if version.parse(torch.__version__) >= version.parse("2.3"):
            scaler = torch.amp.GradScaler("cuda")
        else:
            scaler = torch.cuda.amp.GradScaler()
    """),
    Case(
        """
        import torch

        if torch.__version__ >= "1.10":
            region = torch.autocast("cuda")
        if torch.__version__ < "1.12":
            from torch.cuda.amp import autocast
        """,
        note="`torch.__version__` is a text that compares as versions do.",
    ),
    Case(
        """
        import torch
        from packaging.version import Version

        if Version(torch.__version__) >= Version("2.0"):
            scaler = torch.amp.GradScaler("cuda")
        if torch.__version__.split("+")[0] >= "2.0":
            model = torch.compile(model)
        """,
        min_torch="2.3",
        note="The project needs PyTorch 2.3 anyway; and what has nothing to do with AMP is not looked at.",
    ),
    Case("""
        import torch
        from packaging import version

        if version.parse(torch.__version__) >= version.parse("2.0"):
            try:
                scaler = torch.amp.GradScaler("cuda")
            except AttributeError:
                scaler = torch.cuda.amp.GradScaler()
    """),
    Case("""
        import torch
        from mine import at_least

        if at_least(torch.__version__, "2.0") or torch.__version__ >= minimum:
            scaler = torch.amp.GradScaler("cuda")
    """),
    Case(
        """
        import torch

        if hasattr(torch, "GradScaler"):
            scaler = torch.amp.GradScaler("cuda")
        elif hasattr(torch.amp, "autocast"):
            region = torch.amp.autocast("cuda")
        """,
    ),
    Case(
        """
        import torch
        from packaging.version import Version

        release = Version(torch.__version__).release
        major, minor = release[:2]
        NEWEST = (2, 3)
        if release >= NEWEST and minor > 2:
            scaler = torch.amp.GradScaler("cuda")
        if getattr(torch.amp, "GradScaler", None) is not None:
            scaler = torch.amp.GradScaler("cuda")
        if int(torch.__version__.split(".")[0]) >= 3:
            scaler = torch.amp.GradScaler("cuda")
        """,
    ),
    Case("""
        import torch

        major, minor = (int(part) for part in torch.__version__.split(".")[:2])
        if major > 1 or (major == 1 and minor >= 6):
            from torch.cuda.amp import autocast
        if major >= 2:
            autocast = torch.amp.autocast
        elif minor >= 10:
            autocast = torch.cuda.amp.autocast
        if torch.cuda.is_available() and not (major < 2 and minor < 10):
            autocast = torch.autocast
    """),
    Case("""
        import torch

        parts = tuple(torch.__version__.split("+")[0].split("."))
        if tuple(int(part) for part in parts[:2] if part.isdigit()) >= (2, 4):
            from torch.amp import custom_bwd, custom_fwd
        IS_FIRST = torch.__version__.startswith("1.")
        if IS_FIRST and int(parts[1]) >= 6:
            from torch.cuda.amp import autocast
        if int(parts[0]) == 2 and int(parts[1]) >= 3:
            scaler = torch.amp.GradScaler("cuda")

        def release():
            numbers = torch.__version__.split(".")
            return int(numbers[0]), int(numbers[1])

        if release() < (2, 3):
            from torch.cuda.amp import GradScaler
        else:
            from torch.amp import GradScaler
        if parts[:2] >= oldest:
            from torch.amp import autocast
    """),
    Case(
        """
        import torch

        if torch.__version__[:3] >= "2.0" and int(torch.__version__.split(".")[1]) >= 3:
            scaler = torch.amp.GradScaler("cuda")
        """,
        min_torch="2.0",
        note="All that the project allows have one digit more.",
    ),
    Case(
        """
        import torch

        def release():
            numbers = torch.__version__.split(".")
            return int(numbers[0]), int(numbers[1])

        if release() >= (2, 3):
            scaler = torch.amp.GradScaler("cuda")
        else:
            scaler = torch.cuda.amp.GradScaler()
        """,
        also=("AMP003",),
    ),
)

INVALID = (
    Case(
        """
        import torch
        from packaging import version

        if version.parse(torch.__version__) >= version.parse("2.0.0"):
            scaler = torch.amp.GradScaler("cuda")
        else:
            scaler = torch.cuda.amp.GradScaler()
        """,
        """
        import torch
        from packaging import version

        if version.parse(torch.__version__) >= version.parse("2.3"):
            scaler = torch.amp.GradScaler("cuda")
        else:
            scaler = torch.cuda.amp.GradScaler()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        OLD = torch.__version__ < "1.6"
        if OLD:
            autocast = None
        else:
            from torch.amp import custom_fwd, autocast
        """,
        """
        import torch

        OLD = torch.__version__ < "2.4"
        if OLD:
            autocast = None
        else:
            from torch.amp import custom_fwd, autocast
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        if torch.__version__.split("+")[0] >= "1.6":
            from torch.cuda.amp import autocast
        if str(torch.__version__) < "2.4":
            from torch.cuda.amp import custom_fwd
        """,
        count=2,
        note='As texts "1.10" comes before "1.6", and "2.10" before "2.4".',
    ),
    Case(
        """
        import torch

        TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
        if TORCH >= (1, 10):
            scaler = torch.amp.GradScaler("cuda")
        """,
        """
        import torch

        TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
        if TORCH >= (2, 3):
            scaler = torch.amp.GradScaler("cuda")
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch
        from packaging import version

        TORCH = version.parse(torch.__version__)
        if TORCH >= version.parse("2.0"):
            scaler = torch.amp.GradScaler("cuda")
        """,
        """
        import torch
        from packaging import version

        TORCH = version.parse(torch.__version__)
        if TORCH >= version.parse("2.3"):
            scaler = torch.amp.GradScaler("cuda")
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        if hasattr(torch, "autocast"):
            scaler = torch.amp.GradScaler("cuda")
        """,
    ),
    Case(
        """
        import torch

        if torch.__version__ >= "1.10":
            region = torch.autocast("cuda")
        """,
        min_torch="1.8",
        note="Before 1.10 the version was plain text.",
    ),
    Case(
        """
        import torch

        major, minor = (int(part) for part in torch.__version__.split(".")[:2])
        if (major, minor) >= (2, 0):
            scaler = torch.amp.GradScaler("cuda")
        else:
            scaler = torch.cuda.amp.GradScaler()
        """,
        """
        import torch

        major, minor = (int(part) for part in torch.__version__.split(".")[:2])
        if (major, minor) >= (2, 3):
            scaler = torch.amp.GradScaler("cuda")
        else:
            scaler = torch.cuda.amp.GradScaler()
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        if float(torch.__version__[:3]) >= 1.6:
            from torch.cuda.amp import autocast
        else:
            autocast = None
        """,
        note="As a number, 1.10 is 1.1.",
    ),
    Case(
        """
        import torch
        from packaging.version import Version

        OLDEST = Version("1.13")

        class Trainer:
            MODERN = Version(torch.__version__) >= OLDEST

            def __init__(self):
                if self.MODERN:
                    self.scaler = torch.amp.GradScaler("cuda")
                else:
                    self.scaler = torch.cuda.amp.GradScaler()
        """,
        note="The test is an attribute of the class.",
    ),
    Case(
        """
        import torch

        if getattr(torch.cuda, "amp", None) is not None:
            scaler = torch.amp.GradScaler("cuda")
        """,
    ),
    Case(
        """
        import torch

        if int(torch.__version__.split(".")[0]) >= 2:
            scaler = torch.amp.GradScaler("cuda")
        else:
            scaler = torch.cuda.amp.GradScaler()
        """,
    ),
    Case(
        """
        import torch

        major, minor = (int(part) for part in torch.__version__.split(".")[:2])
        if major >= 1 and minor >= 6:
            from torch.cuda.amp import autocast
        """,
        note="PyTorch 2.0 is newer than 1.6.",
    ),
    Case(
        """
        import torch

        parts = torch.__version__.split(".")
        if int(parts[1]) < 6:
            autocast = None
        else:
            from torch.cuda.amp import autocast
        if parts[1] >= "6":
            from torch.cuda.amp import GradScaler
        """,
        count=2,
    ),
    Case(
        """
        import torch

        TORCH = tuple(torch.__version__.split(".")[:2])
        if TORCH >= ("2", "4"):
            from torch.amp import custom_bwd, custom_fwd
        if torch.__version__.split("+")[0].split(".") < ["2", "3", "0"]:
            from torch.cuda.amp import GradScaler
        parts = torch.__version__.split(".")
        scaler = torch.amp.GradScaler("cuda") if (parts[0], parts[1]) >= ("2", "3") else None
        """,
        count=3,
        note='As a text, "10" comes before "4", in a tuple as well.',
    ),
    Case(
        """
        import torch

        def release():
            return tuple(map(int, torch.__version__.split(".")[:2]))

        if torch.cuda.is_available() and release() >= (2, 0):
            scaler = torch.amp.GradScaler("cuda")
        if torch.__version__.startswith("2."):
            from torch.amp import custom_fwd
        """,
        count=2,
    ),
    Case(
        """
        import torch

        if torch.__version__[:3] >= "1.6":
            from torch.cuda.amp import autocast
        if torch.__version__.partition("+")[0] >= "1.9":
            from torch.cuda.amp import GradScaler
        """,
        count=2,
        note='The first three characters of "1.10" are "1.1".',
    ),
)

RULE = Rule(
    code="AMP109",
    name="version-guard",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="this test of the version is wrong for some version of PyTorch",
    what=(
        "A test of PyTorch's version that compares texts, or lets versions through that do not have the AMP name under "
        'it. `torch.__version__` itself is no plain text since PyTorch 1.10: `torch.__version__ >= "2.4"` compares as '
        "versions do, and is right. What is made of it is plain text: `str(torch.__version__)`, slices, and what "
        "`split` and `partition` give. Versions that `importlib.metadata` tells are not looked at."
    ),
    why=(
        "`torch.autocast` is there from PyTorch 1.10, `torch.amp.autocast` from 1.12, `torch.amp.GradScaler` from 2.3, "
        '`torch.amp.custom_fwd` and `torch.get_autocast_dtype` from 2.4. As a text, "2.10" is less than "2.4".'
    ),
    fine="The versions for which it is wrong are never used: say so with `min-torch`.",
    words=(
        "__version__ autocast",
        "__version__ GradScaler",
        "__version__ torch.amp",
        "hasattr(torch",
        "getattr(torch GradScaler",
        "getattr(torch autocast",
    ),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
