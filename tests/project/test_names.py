"""docs/api/names.md: every public name, command and exit code is in its tables, and the examples run."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import click
import pytest

import precast
from precast.cli.exit_codes import ExitCode
from precast.cli.main import main
from tests.support.pages import blocks

PAGE = Path(__file__).parents[2] / "docs" / "api" / "names.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(precast\.[\w.]+)` \| (.+?) \| `(.+)` \|$", TEXT, re.M)
MODULES = {"precast": precast, "precast.events": precast.events}
MODULES |= {"precast.errors": precast.errors, "precast.optim": precast.optim}


def test_every_public_name_has_one_row() -> None:
    public = [f"{path}.{name}" for path, module in MODULES.items() for name in module.__all__]
    public.remove("precast.__version__")
    assert sorted(name for name, _, _ in ROWS) == sorted(public)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [(_, setup)] = blocks(PAGE, "python")
    namespace: dict[str, Any] = {}
    exec(setup, namespace)
    for name, _, example in ROWS:
        code, _, error = example.partition("  # raises ")
        outcome = ""
        try:
            exec(code, namespace)
        except Exception as raised:
            outcome = type(raised).__name__
        assert outcome == error, f"the example of {name}: {example}"


def test_every_command_has_one_row_and_is_called_as_it_is() -> None:
    context = click.Context(main)
    commands = re.findall(r"^\| `(\w+)` \| .+ \| `precast (\w+)\b.*` \|$", TEXT, re.M)
    assert [name for name, _ in commands] == main.list_commands(context)
    assert all(name == called for name, called in commands)


def test_an_option_has_one_help_text_in_all_commands() -> None:
    """But for its default. `--json` of run is a file, because stdout is the script's."""
    texts: dict[str, set[str]] = {}
    for name in ("build", "demo", "doctor", "explain", "export", "run", "tune"):
        command = main.get_command(click.Context(main), name)
        assert command is not None
        for option in command.params:
            if isinstance(option, click.Option) and (name, option.name) != ("run", "as_json"):
                text = (option.help or "").partition("  [default")[0]
                texts.setdefault(option.opts[0], set()).add(text)
    shared = {"--json", "--policy", "--dtype", "--device", "--seed", "--report"}
    assert {option: len(texts[option]) for option in shared} == dict.fromkeys(shared, 1)


def test_the_exit_codes_are_those_of_the_commands() -> None:
    table = re.findall(r"^\| (\d+) \| (.+) \|$", TEXT, re.M)
    assert table == [(str(int(code)), code.meaning) for code in ExitCode]


def test_what_says_torch_has_pytorchs_policy_and_all_else_the_default_one() -> None:
    functions = (precast.convert, precast.load_converted, precast.export, precast.install)
    defaults = {f.__name__: inspect.signature(f).parameters["policy"].default for f in functions}
    defaults["tune"] = precast.TuningOptions().base
    for name in ("explain", "export", "run", "tune"):
        command = main.get_command(click.Context(main), name)
        assert command is not None
        [option] = [each for each in command.params if each.opts[0] in ("--policy", "--base")]
        defaults[f"precast {name}"] = option.default
    of_torch = {name for name, policy in defaults.items() if policy == "torch"}
    assert of_torch == {"install", "precast run"}
    assert {policy for name, policy in defaults.items() if name not in of_torch} == {"default"}
