"""AMP007: strings that name something deprecated: quoted annotations, what mocks replace, configurations."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.guards import is_guarded
from precast_lint.model import Applicability, Case, Finding, Fix, Rule, Severity
from precast_lint.parsing.names import canonical
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted, strings, walk
from precast_lint.renaming import old_names

__all__ = ["RULE"]

_LOADERS = {
    "get_class",
    "import_module",
    "import_string",
    "instantiate",
    "load_object",
    "locate",
    "patch",
    "resolve_name",
    "setattr",
}


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each string."""
    yield from old_names.findings(source, RULE)
    for string in source.all(cst.SimpleString):
        name = strings(string)
        old = old_names.OLD.get(canonical(name)) if name else None
        if old is None or name is None or not source.allows(old.since):
            continue
        if _is_loaded(source, string) and not is_guarded(source, string):
            message = RULE.message.format(old=name, new=old_names.new_name(name))
            fix = _new_type(source, string, name)
            yield source.find(RULE, string, message, fix)


def _new_type(source: Source, string: cst.SimpleString, name: str) -> Fix | None:
    """The new name in `cast("torch.cuda.amp.GradScaler", x)`, which is an annotation; elsewhere it may be looked up."""
    arg = source.parents[string]
    call = source.parents[arg]
    if not isinstance(call, cst.Call) or source.origin(call.func) != "typing.cast":
        return None
    text = source.code(string).replace(name, old_names.new_name(name))
    return source.fix("Use the new name", source.replace(string, text))


def _is_loaded(source: Source, string: Node) -> bool:
    """Whether code that gets this string is going to look the name up: no text for people."""
    parent = source.parents[string]
    if isinstance(parent, cst.Arg):
        call = source.parents[parent]
        name = dotted(call.func) if isinstance(call, cst.Call) else None
        if isinstance(call, cst.Call) and source.origin(call.func) == "typing.cast":
            return call.args[0] is parent
        return (name or "").rpartition(".")[2] in _LOADERS or _imports(source, call)
    if isinstance(parent, cst.DictElement):
        return parent.value is string
    return isinstance(parent, (cst.Assign, cst.AnnAssign))


def _imports(source: Source, call: Node) -> bool:
    """Whether a call runs a function of this file that imports what a text names."""
    function = source.values.handed.function_called(call) if isinstance(call, cst.Call) else None
    return function is not None and any(
        isinstance(node, cst.Call)
        and (source.origin(node.func) or source.names.builtin(node.func))
        in ("importlib.import_module", "pydoc.locate", "pkgutil.resolve_name", "__import__")
        for node in walk(function)
    )


VALID = (
    Case("""
        \"\"\"torch.cuda.amp.autocast\"\"\"
        print("torch.cuda.amp.autocast")
        OLD = ["torch.cuda.amp.autocast"]
    """),
    Case(
        """
        import warnings

        warnings.filterwarnings("ignore", message="torch.cuda.amp.GradScaler")
        """,
    ),
    Case("""
        from typing import cast

        def name_of(trainer):
            return cast(str, "torch.cuda.amp.GradScaler")
    """),
)

INVALID = (
    Case(
        """
        import importlib

        def load(path):
            module, _, name = path.rpartition(".")
            return getattr(importlib.import_module(module), name)

        scaler = load("torch.cuda.amp.GradScaler")
        """,
        count=1,
    ),
    Case(
        """
        import torch

        def train(scaler: "torch.cuda.amp.GradScaler | None") -> None:
            pass
        """,
        """
        import torch

        def train(scaler: "torch.amp.GradScaler | None") -> None:
            pass
        """,
        count=1,
    ),
    Case(
        """
        from unittest import mock

        def test_region():
            with mock.patch("torch.cuda.amp.autocast"):
                run()
        """,
        note="What is tested may use the new name, and then nothing is replaced. There is no fix: read both.",
    ),
    Case(
        """
        settings = {"scaler": "torch.cuda.amp.GradScaler"}
        """,
        note="Who makes an object of it hands on arguments that are not seen here.",
    ),
    Case(
        """
        from __future__ import annotations
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from torch.cuda.amp import GradScaler

        def train(scaler: "GradScaler") -> None:
            pass
        """,
        """
        from __future__ import annotations
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from torch.amp import GradScaler

        def train(scaler: "GradScaler") -> None:
            pass
        """,
    ),
    Case(
        """
        from typing import cast

        def scaler_of(trainer):
            return cast("torch.cuda.amp.GradScaler", trainer.scaler)
        """,
        """
        from typing import cast

        def scaler_of(trainer):
            return cast("torch.amp.GradScaler", trainer.scaler)
        """,
    ),
)

RULE = Rule(
    code="AMP007",
    name="old-name-in-string",
    severity=Severity.WARNING,
    fix=Applicability.SAFE,
    message="`{old}` is deprecated; use `{new}`",
    what=(
        "Deprecated names in strings that are code: quoted annotations, what `mock.patch` replaces, what a "
        "configuration has loaded."
    ),
    why="A search for imports does not find them, and they fail when the deprecated name goes.",
    fine="The string is shown to people, or stands for old files.",
    words=("cuda autocast", "cpu autocast", "GradScaler", "custom_fwd", "custom_bwd"),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
