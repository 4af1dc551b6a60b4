"""The command line: exit codes, one message for an error, one object for --json, no torch for --help."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import precast
from precast.cli.demo import example
from precast.cli.main import main
from precast.errors import PrecastError


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def precast_(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def one_message(result: Result) -> str:
    """The message of a failure: the only line on stderr that begins with "Error: "."""
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    return errors[0].removeprefix("Error: ")


def test_help_and_version_need_neither_torch_nor_rich() -> None:
    code = (
        "import sys; from precast.cli.main import main; main(standalone_mode=False);"
        "sys.exit(bool({'torch', 'rich', 'numpy'} & set(sys.modules)))"
    )
    for argument in ("--help", "--version"):
        done = subprocess.run(
            [sys.executable, "-c", code, argument], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "precast" in done.stdout or "Commands:" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_complete_commands_and_options(shell: str) -> None:
    """With the line that docs/usage.md gives, which asks the command for a script."""

    def asked(word: str, **environment: str) -> Result:
        given = {"_PRECAST_COMPLETE": f"{shell}_{word}", **environment}
        return CliRunner().invoke(main, env=given, prog_name="precast")

    page = (Path(__file__).parents[2] / "docs" / "usage.md").read_text(encoding="utf-8")
    assert f"_PRECAST_COMPLETE={shell}_source precast" in page
    assert "_precast_completion" in asked("source").output
    cursor = (
        ("ru", "--he") if shell == "fish" else ("1", "2")
    )  # fish sends the word, not its number
    begun = asked("complete", COMP_WORDS="precast ru", COMP_CWORD=cursor[0]).output
    assert {"run"} <= set(re.split(r"[\s,]+", begun))
    option = asked("complete", COMP_WORDS="precast run --he", COMP_CWORD=cursor[1]).output
    assert {"--health", "--help"} <= set(re.split(r"[\s,]+", option))


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "precast", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"precast, version {precast.__version__}\n"


def test_help_names_every_command_and_fits_80_columns() -> None:
    text = precast_("--help").output
    for command in ("build", "demo", "doctor", "explain"):
        assert f"  {command}" in text
        of_command = precast_(command, "--help").output
        assert ("--json" in of_command) is (command != "demo")
        assert all(len(line) <= 80 for line in of_command.splitlines())
    assert "..." not in text.split("Commands:")[1]


# --- demo ---


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo that does not train."""
    monkeypatch.setattr("precast.cli.demo.example.train_both", lambda *_: pytest.fail("trained"))


def test_demo_trains_prints_and_writes_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "picture.png"
    options = ("--size", "16", "--steps", "10", "--device", "cpu", "--out", str(path))
    result = precast_("demo", *options)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "16 x 16 pixels; 10 steps on cpu" in result.stdout
    assert f"picture: {path}" in result.stdout.splitlines()
    assert path.stat().st_size > 1000
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "chess"), "unexpected extra argument (chess)"),
        (("demo", "--dtype", "int8"), "'int8' is no 16-bit dtype. Write bfloat16 or float16"),
        (("demo", "--device", "abacus"), "expected a device of this machine (cpu"),
        (("demo", "--size", "3"), "expected a size (pixels along a side) from 16 to 4096, got 3"),
        (("demo", "--size", "0"), "got 0"),
        (("demo", "--size", "big"), "'big' is not a valid integer"),
        (("demo", "--steps", "0"), "0 is not in the range x>=10"),
        (("demo", "--seed", "-1"), "-1 is not in the range"),
        (("sing",), "no command 'sing'"),
        (("doctor", "--loud"), "No such option"),
    ],
)
def test_what_is_asked_wrongly_is_one_message_and_exit_code_2(
    arguments: tuple[str, ...], message: str
) -> None:
    result = precast_(*arguments)
    assert result.exit_code == 2
    assert message in one_message(result)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_cuda_that_is_not_there_is_one_message_and_exit_code_2() -> None:
    result = precast_("demo", "--device", "cuda")
    assert result.exit_code == 2
    assert "expected a device of this machine (cpu), got 'cuda'" in one_message(result)


def test_an_error_of_ours_is_one_message_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise PrecastError("the reason")

    monkeypatch.setattr("precast.cli.demo.display.require_matplotlib", fail)
    result = precast_("demo")
    assert result.exit_code == 1
    assert one_message(result) == "the reason"


def test_an_error_that_nobody_planned_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("precast.cli.demo.display.require_matplotlib", fail)
    assert isinstance(precast_("demo").exception, ZeroDivisionError)


@pytest.mark.usefixtures("untrained")
def test_a_missing_extra_is_named_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = precast_("demo", "--out", str(tmp_path / "p.png"))
    assert result.exit_code == 1
    assert "pip install matplotlib" in one_message(result)


def test_training_that_breaks_is_shown_and_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train = example.train_both

    def diverge(*arguments: Any) -> example.DemoResult:
        trained = train(*arguments)
        trained.mixed.losses[-1] = math.nan
        return trained

    monkeypatch.setattr(example, "train_both", diverge)
    options = ("--size", "16", "--steps", "10", "--device", "cpu")
    result = precast_("demo", *options, "--out", str(tmp_path / "p.png"))
    assert result.exit_code == 1
    assert "ended with loss nan" in result.stderr


# --- doctor ---


def test_doctor_prints_one_recommendation() -> None:
    result = precast_("doctor")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert sum(line.startswith("Use ") for line in result.stdout.splitlines()) == 1
    assert "Why: " in result.stdout


def test_doctor_json_is_one_object_and_nothing_else() -> None:
    result = precast_("doctor", "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    value = json.loads(result.stdout)
    assert value["torch"] == torch.__version__
    assert value["recommendation"]["dtype"] in {"float32", "bfloat16", "float16"}


WITHOUT_TORCH = """
import sys
for name in ("torch", *sys.argv.pop(1).split(",")):
    sys.modules[name] = None
from precast.cli.main import main
main()
"""


@pytest.mark.parametrize("rich", ["numpy", "rich,tomli_w,numpy"])
@pytest.mark.parametrize(
    "command",
    [["build"], ["demo"], ["doctor"], ["explain", "softmax"], ["explain", "--model", "a:b"]],
    ids=" ".join,
)
def test_without_pytorch_a_command_that_needs_it_says_so(
    tmp_path: Path, command: list[str], rich: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, rich, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"Error: precast {command[0]} needs PyTorch, which is not installed"
    )
    assert "Traceback" not in done.stderr


def test_without_pytorch_a_program_runs_and_its_report_is_written(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('it ran')")
    for command in (
        ["run", "--json", "a.json", "program.py"],
        ["run", "--merge", "--report", "b.html", "a.json"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, "rich,tomli_w", *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "there is no report" not in done.stderr
    assert json.loads((tmp_path / "a.json").read_text())["run"]["ended"] == "ended"
    assert (tmp_path / "b.html").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "--policy", "nope", "softmax"),
        ("explain", "--device", "abacus", "softmax"),
        ("explain", "softmx"),
        ("run", "--policy", "nope", __file__),
    ],
    ids=" ".join,
)
def test_a_value_that_cannot_be_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    result = precast_(*arguments)
    assert result.exit_code == 2
    one_message(result)
