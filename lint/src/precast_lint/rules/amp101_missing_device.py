"""AMP101: a region that is not told its device type."""

from __future__ import annotations

from collections.abc import Iterator

from precast_lint.meaning.guards import is_guarded, is_tried
from precast_lint.meaning.kinds import is_dtype, is_flag, the_device
from precast_lint.meaning.regions import AUTOCASTS, NEW_AUTOCASTS, arguments_of
from precast_lint.model import Applicability, Case, Edit, Finding, Fix, Rule, Severity
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.names import canonical
from precast_lint.parsing.scopes import Binding
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst

__all__ = ["RULE"]

_QUERIES = ("torch.get_autocast_dtype", "torch.amp.is_autocast_available")


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each call without a device type."""
    for call, own in [*source.calls(*NEW_AUTOCASTS, *_QUERIES), *_one_of_several(source)]:
        arguments = arguments_of(source, call) if _is_only_read(source, call) else own
        if arguments.starred or "device_type" in arguments.keywords or is_tried(source, call):
            continue
        first = arguments.get("device_type", 0)
        if first is not None and _slot(source, first) is None:
            continue
        yield source.find(RULE, call, fix=_fix(source, call, arguments, first))
    for call in source.all(cst.Call):
        made = source.values.filled_in(call.func)
        if made is not None and source.origin(made.args[0].value) in NEW_AUTOCASTS:
            arguments = Arguments.of_partial(made, call)
            if (
                arguments.starred
                or arguments.get("device_type", 0) is not None
                or is_tried(source, call)
            ):
                continue
            yield source.find(RULE, call, fix=_fix_partial(source, made))


def _is_only_read(source: Source, call: cst.Call) -> bool:
    """Whether the table of `torch.autocast(**table)` is nowhere but in such places, so that nothing changes it."""
    starred = [arg.value for arg in call.args if arg.star]
    name = starred[0] if len(starred) == 1 else None
    if not isinstance(name, cst.Name) or source.names.only_binding(name) is None:
        return False
    home = source.scopes.scope_of[name].home(name.value)
    parents = (
        [source.parents[n] for n in source.scopes.references(home, name.value)] if home else []
    )
    return all(
        isinstance(p, cst.AssignTarget) or (isinstance(p, cst.Arg) and p.star == "**")
        for p in parents
    )


def _fix_partial(source: Source, made: cst.Call) -> Fix | None:
    """The device type in `functools.partial(torch.autocast, dtype=...)`."""
    device = the_device(source)
    if device is None:
        return None
    edit = source.after(made.args[0].value, f", {source.quoted(device, made)}")
    return source.fix("Give the only device type that the file names", edit, unsafe=True)


def _one_of_several(source: Source) -> Iterator[tuple[cst.Call, Arguments]]:
    """The calls of a name that several imports bind to regions, one of which is to be told its device type."""
    for call in source.all(cst.Call):
        bindings = source.names.bindings(call.func)
        if source.origin(call.func) is not None:
            continue
        if len(bindings) < 2 or any(b.kind not in ("import", "from") for b in bindings):
            continue
        bindings = _in_force(source, bindings)
        origins = {canonical(binding.path or "") for binding in bindings}
        if is_guarded(source, call):
            continue  # `autocast("cuda") if NEW else autocast()`
        if origins <= set(AUTOCASTS) and origins & set(NEW_AUTOCASTS):
            yield call, Arguments.of(call)


def _in_force(source: Source, bindings: list[Binding]) -> list[Binding]:
    """The last of some imports, where they follow one another in one block; else all of them."""
    lines = [source.statement(binding.node) for binding in bindings]
    blocks = {source.parents[line] for line in lines}
    return bindings[-1:] if len(blocks) == 1 else bindings


def _slot(source: Source, node: Node) -> str | None:
    """The parameter that an argument in the device's place is meant for."""
    if is_dtype(source, node):
        return "dtype"
    return "enabled" if is_flag(source, node) else None


def _fix(source: Source, call: cst.Call, arguments: Arguments, first: Node | None) -> Fix | None:
    device = the_device(source)
    if device is None or len(arguments.positional) > 1:
        return None
    text = source.quoted(device, call)
    message = "Give the only device type that the file names"
    if first is not None:
        name = _slot(source, first)
        if name in arguments.keywords or source.origin(call.func) in _QUERIES:
            return None
        return source.fix(message, source.before(call.args[0], f"{text}, {name}="), unsafe=True)
    if call.args:
        return source.fix(message, source.before(call.args[0], f"{text}, "), unsafe=True)
    end = source.span(call).end - 1
    return source.fix(message, Edit(end, end, text), unsafe=True)


VALID = (
    Case("""
        import torch

        options = {"dtype": torch.float16}
        options["device_type"] = "cuda"
        more = dict(dtype=torch.float16)
        more.update(device_type="cuda")
        with torch.autocast(**options), torch.autocast(**more):
            pass
    """),
    Case("""
        from functools import partial
        import torch

        region = partial(torch.autocast, dtype=torch.float16)

        def run(net, x, device):
            with region(device), region(device_type="cuda"):
                return net(x)
    """),
    Case("""
        import torch

        def run(device_type, **options):
            with torch.autocast(device_type), torch.autocast(device_type="cpu", enabled=False):
                return torch.autocast(**options)
    """),
    Case(
        """
        from torch.cuda.amp import autocast

        with autocast(), autocast(enabled=True):
            pass
        """,
        note="The old names know their device.",
    ),
    Case(
        """
        import pytest
        import torch

        def test_device_type_is_needed():
            with pytest.raises(TypeError):
                torch.autocast()
        """,
        note="It is expected to fail.",
    ),
    Case("""
        from accelerate import Accelerator

        with Accelerator().autocast():
            pass
    """),
    Case(
        """
        try:
            from torch.amp import autocast
        except ImportError:
            from torch import autocast

        with autocast("cuda"):
            pass
        """,
    ),
    Case(
        """
        from torch.amp import autocast
        from torch.cuda.amp import autocast

        with autocast(enabled=True):
            pass
        """,
        note="The second import takes the place of the first.",
    ),
    Case("""
        try:
            from torch.amp import autocast
            NEW = True
        except ImportError:
            from torch.cuda.amp import autocast
            NEW = False

        with autocast("cuda") if NEW else autocast():
            loss = model(x)
    """),
)

INVALID = (
    Case("""
        import torch

        OPTIONS = dict(dtype=torch.float16)
        with torch.autocast(**OPTIONS):
            pass
    """),
    Case(
        """
        from functools import partial
        import torch

        region = partial(torch.autocast, dtype=torch.float16)

        def run(net, x):
            with region():
                return net(x.cuda())
        """,
        """
        from functools import partial
        import torch

        region = partial(torch.autocast, "cuda", dtype=torch.float16)

        def run(net, x):
            with region():
                return net(x.cuda())
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        model = Net().cuda()
        with torch.autocast(dtype=torch.bfloat16):
            model(x)
        """,
        """
        import torch

        model = Net().cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model(x)
        """,
        unsafe=True,
    ),
    Case(
        """
        from torch import autocast

        model.to('cuda:0')
        with autocast():
            pass
        """,
        """
        from torch import autocast

        model.to('cuda:0')
        with autocast('cuda'):
            pass
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.amp.autocast(enabled=True):
            pass
        """,
        note="The file is for two device types: there is no fix.",
    ),
    Case(
        """
        import torch

        x = x.cuda()
        with torch.autocast(torch.bfloat16):
            pass
        with torch.autocast(scaler is not None, dtype=torch.bfloat16):
            pass
        """,
        """
        import torch

        x = x.cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            pass
        with torch.autocast("cuda", enabled=scaler is not None, dtype=torch.bfloat16):
            pass
        """,
        unsafe=True,
        count=2,
    ),
    Case("""
        import torch

        dtype = torch.get_autocast_dtype()
    """),
    Case(
        """
        try:
            from torch.amp import autocast
        except ImportError:
            from torch.cuda.amp import autocast

        with autocast():
            pass
        """,
        note="It raises with the first of the two, which is there since PyTorch 1.12.",
    ),
    Case(
        """
        import torch
        from torch import autocast
        from torch.amp import autocast

        def train(model, x):
            x = x.cuda()
            with autocast(dtype=torch.bfloat16):
                return model(x)
        """,
        """
        import torch
        from torch import autocast
        from torch.amp import autocast

        def train(model, x):
            x = x.cuda()
            with autocast("cuda", dtype=torch.bfloat16):
                return model(x)
        """,
        unsafe=True,
        note="Two names of one thing.",
    ),
)

RULE = Rule(
    code="AMP101",
    name="missing-device-type",
    severity=Severity.ERROR,
    fix=Applicability.UNSAFE,
    message="the device type is missing: this raises when it runs",
    what="`torch.autocast`, `torch.get_autocast_dtype` and `torch.amp.is_autocast_available` without a device type.",
    why=(
        "The device type is the first parameter and has no default value. Code that was moved from "
        "`torch.cuda.amp.autocast` by changing the import alone raises TypeError, or ValueError if it gives a dtype "
        "or a flag by position."
    ),
    fine="Never: it raises on each PyTorch that has the name.",
    words=("autocast",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
