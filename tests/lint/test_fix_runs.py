"""A program runs before and after its fix: it makes the same regions and scalers, and ends in the same way.

Invariant: unknown names are stubs, so a program runs as far as it can. A repaired program misses no name.
"""

from __future__ import annotations

import builtins
import inspect
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import patch

import pytest
import torch

from precast_lint.checking.engine import fix
from precast_lint.model import Applicability
from precast_lint.parsing.text import decode
from precast_lint.selecting.registry import all_rules
from precast_lint.selecting.settings import LintSettings
from tests.lint.cases import ALL, Case
from tests.lint.mutation.measuring import sample

SEED = int(os.environ.get("PRECAST_MUTATION_SEED", "0"))
SIZE = 3  # programs of each rule
FIXED = [  # a type alias is no Python before 3.12
    case for case in ALL if case.fixed != case.code and "\ntype " not in case.code
]
CODES = [rule.code for rule in all_rules().values() if rule.fix is not Applicability.NONE]
# Rules about errors: the program does something else, or anything at all, only after the fix.
REPAIRS = {"AMP010", "AMP104"}
BROKEN = {"NameError", "UnboundLocalError", "AttributeError", "ImportError", "SyntaxError"}


class _Stub:
    """A value of unknown kind: all that is done with it gives another one. It has two elements and a tensor's dtype."""

    dtype = torch.float32

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub()

    def __iter__(self) -> Iterator[Any]:
        return iter([_Stub(), _Stub()])

    def __exit__(self, *error: object) -> None: ...

    def __setitem__(self, *item: object) -> None: ...


def _another(*arguments: object, **more: object) -> _Stub:
    return _Stub()


_ACTS = (
    "call enter getitem add radd sub rsub mul rmul truediv rtruediv matmul mod pow neg lt gt iadd"
)
for _name in _ACTS.split():
    setattr(_Stub, f"__{_name}__", _another)


class _Names(dict[str, Any]):
    """Global names of a program; an unknown one is a stub."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return self.setdefault(name, _Stub())


class _Modules(MetaPathFinder, Loader):
    """Finds a stub for each module that is not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        is_ours = name.startswith(("torch", "precast"))
        return None if is_ours else ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> Any:
        return _Stub()

    def exec_module(self, module: object) -> None: ...


def _functions(names: dict[str, Any]) -> Iterator[Any]:
    """Yield the functions of a program and the methods of its classes."""
    own = [value for value in names.values() if getattr(value, "__module__", "") == "program"]
    for value in own:
        if inspect.isfunction(value):
            yield value
        elif inspect.isclass(value):
            yield from (part for part in vars(value).values() if inspect.isfunction(part))


def _outcome(run: Any, *arguments: object) -> str:
    try:
        run(*arguments)
    except Exception as error:  # whatever a program of stubs ends with
        return type(error).__name__
    return "ran"


def _run(text: str) -> tuple[list[str], list[object]]:
    """Run a program and call its functions. Return how each ended, and its regions and scalers."""
    log: list[object] = []
    names = _Names(__name__="program")

    def recorded(kind: type) -> Any:
        original = vars(kind)["__init__"]
        signature = inspect.signature(original)

        def init(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            values = dict(list(bound.arguments.items())[1:])
            if "device_type" in values and values.get("dtype") is None:
                values["dtype"] = torch.get_autocast_dtype(values["device_type"])
            if values.get("cache_enabled") is None:
                values["cache_enabled"] = True
            log.append({name: _plain(value) for name, value in values.items()})
            original(*args, **kwargs)

        return patch.object(kind, "__init__", init)

    kept = dict(sys.modules)
    settings = {
        device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    }
    with warnings.catch_warnings(), recorded(torch.amp.GradScaler), recorded(torch.autocast):
        warnings.simplefilter("ignore")
        finder = _Modules()
        sys.meta_path.append(finder)
        try:
            ends = [_outcome(exec, compile(text, "program.py", "exec", dont_inherit=True), names)]
            for function in _functions(names):
                ends.append(
                    _outcome(function, *(_Stub() for _ in inspect.signature(function).parameters))
                )
        finally:
            for device, (is_enabled, dtype) in settings.items():
                torch.set_autocast_enabled(device, is_enabled)
                torch.set_autocast_dtype(device, dtype)
            sys.meta_path.remove(finder)
            for name in sys.modules.keys() - kept:
                if isinstance(sys.modules[name], _Stub):
                    del sys.modules[name]
    return ends, log


def _plain(value: object) -> object:
    return "a stub" if isinstance(value, _Stub) else value


def _compare(code: str, before: str, after: str) -> None:
    (ends, log), (new_ends, new_log) = _run(before), _run(after)
    if code in REPAIRS:
        assert not BROKEN & (set(new_ends) - set(ends)), after
    else:
        assert (ends, log) == (new_ends, new_log), after


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=f"{c.rule.code}-{n}") for n, c in enumerate(FIXED, 1)]
)
def test_a_case_runs_after_its_fix(case: Case) -> None:
    _compare(case.rule.code, case.code, case.fixed)


@pytest.mark.parametrize("code", CODES)
def test_a_program_runs_after_its_fix(code: str) -> None:
    settings = LintSettings(codes=frozenset({code}), unsafe_fixes=True)
    for mistake in sample(code, SEED, SIZE):
        fixed = fix(decode(mistake.text.encode()), "program.py", settings).text.string
        _compare(code, mistake.text, fixed)
