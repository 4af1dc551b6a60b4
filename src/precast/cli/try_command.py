"""The command `precast try`.

Invariants: this process does not import torch. `--json` prints one object on stdout and nothing else. Ctrl-C ends all
trials.
"""

from __future__ import annotations

import re
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from precast._internal import atomic_write
from precast.cli.exit_codes import ExitCode
from precast.cli.options import json_option, policy_option, script_arguments
from precast.cli.run_command import check_policy

if TYPE_CHECKING:
    from precast.running.trial.plan import TrialPlan

__all__ = ["try_"]

_IMPORT = re.compile(r"^\s*(?:import|from)\s+([\w.]+)", re.MULTILINE)
_UNSEEN = {"h5py", "lmdb", "pyarrow", "sqlite3", "subprocess", "tables", "zarr"}
_CODES = {
    "use": ExitCode.YES,
    "failed": ExitCode.NO,
    "keep": ExitCode.KEEP,
    "undecided": ExitCode.UNDECIDED,
}


def _function(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    if value is not None and not all(value.partition(":")):
        raise click.BadParameter(f"expected MODULE:NAME, as in train:train_step, got {value!r}")
    return value


@click.command(
    "try",
    short_help="Compare a script in float32 and in mixed precision.",
    context_settings={"allow_interspersed_args": False},
)
@script_arguments
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    help="Measured steps of each trial, after 5 steps of warm-up.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=180,
    show_default=True,
    help="Time for all trials.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="The 16-bit dtype; auto tries both where the processor does not emulate float16.",
)
@policy_option("torch")
@click.option(
    "--seeds",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Other seeds for float32, to tell a difference of the loss from noise.",
)
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes of a trial, started by torchrun.",
)
@click.option(
    "--step",
    "step_function",
    metavar="MODULE:NAME",
    callback=_function,
    help="A function each of whose calls is a step, where no optimizer and no model is seen.",
)
@click.option("--allow-writes", is_flag=True, help="Let the trials write files as the script does.")
@click.option(
    "--report",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write the answer as a page.",
)
@click.option(
    "--diff",
    "prints_patch",
    is_flag=True,
    help="Print the lines to add as a patch on stdout, and all else on stderr.",
)
@json_option
def try_(
    *,
    program: str | None,
    arguments: tuple[str, ...],
    is_module: bool,
    steps: int,
    seconds: float,
    dtype: str,
    policy: str,
    seeds: int,
    nproc: int,
    step_function: str | None,
    allow_writes: bool,
    page: Path | None,
    prints_patch: bool,
    as_json: bool,
) -> None:
    """Measure what mixed precision would bring to a script, without a change of it.

    The script runs in float32 and in mixed precision, in turns, each time in a process of its own
    that ends after some steps. A table compares time, memory and loss. Everything after SCRIPT is
    passed to the script.

    The exit code is 0 if a setting is faster or smaller and learns as float32, 3 if none is, 4 if
    the trials do not decide it, and 1 if the script fails in float32.
    """
    from precast.running.target import Target
    from precast.running.trial.answer import answer_of
    from precast.running.trial.experiment import Experiment
    from precast.running.trial.plan import TrialPlan
    from precast.running.trial.process import Launcher

    if program is None:
        raise click.UsageError("expected a script, as in `precast try train.py`")
    if as_json and prints_patch:
        raise click.UsageError("--json and --diff both print on stdout; name one of them.")
    check_policy(policy)
    if page is not None:
        from precast import report

        report.needed()
        if error := atomic_write.foreign_file_error(page, "--report"):
            raise click.UsageError(error)
    target = Target(program, is_module, arguments)
    if target.is_stdin:
        raise click.UsageError("a script on stdin cannot run several times; name a file.")
    try:
        target.check()
    except ValueError as error:
        raise click.UsageError(str(error).replace("precast run", "precast try")) from error
    plan = TrialPlan(
        program,
        is_module,
        [*arguments],
        policy=policy,
        steps=steps,
        seconds=seconds,
        step_function=step_function,
        allows_writes=allow_writes,
    )
    if not allow_writes:
        _name_unseen_writers(program, is_module)
    for number in (signal.SIGTERM, signal.SIGHUP):  # trials end with this process
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="precast-try-") as folder:
        launcher = Launcher(Path(folder), nproc, _Progress())
        experiment = Experiment(plan, launcher, dtype, seeds)
        experiment.run()
    answer = answer_of(experiment)
    if as_json:
        import json

        click.echo(json.dumps(answer.to_dict(), indent=2, allow_nan=False))
    else:
        click.echo(answer.text(), nl=False, err=prints_patch)
    if prints_patch:
        patch, note = answer.patch()
        click.echo(patch, nl=False)
        click.echo(note, err=True, nl=bool(note))
    if page is not None:
        atomic_write.replace_own(page, answer.page(target.command).encode())
        click.echo(f"written: {page}", err=True)
    sys.exit(_CODES[answer.verdict])


def _name_unseen_writers(program: str, is_module: bool) -> None:
    """Print the imported modules that write files without Python's functions.

    The files of the script, and of the modules beside it that it imports, are read without running them.
    """
    base = Path(*program.split(".")) if is_module else Path(program)
    files = [base.with_suffix(".py"), base / "__main__.py"] if is_module else [base]
    folder, names = Path() if is_module else base.parent, set()
    for file in files:  # grows meanwhile
        with suppress(OSError, UnicodeDecodeError):
            for name in _IMPORT.findall(file.read_text(encoding="utf-8")):
                names.add(name.partition(".")[0])
                beside = folder.joinpath(*name.split("."))
                new = (beside.with_suffix(".py"), beside / "__init__.py")
                files += [each for each in new if each.is_file() and each not in files]
    if writers := ", ".join(sorted(names & _UNSEEN)):
        text = f"precast: the script imports {writers}: files that these write are not withheld"
        click.echo(text, err=True)


class _Progress:
    """Prints the progress on stderr: on a terminal in one line, elsewhere one line for each trial."""

    def __init__(self) -> None:
        self._folder = ""

    def __call__(self, plan: TrialPlan, steps: int) -> None:
        is_terminal = sys.stderr.isatty()
        if not is_terminal and plan.folder == self._folder:
            return
        self._folder = plan.folder
        text = f"precast: {plan.name}, step {steps} of {plan.steps + plan.warm_up}"
        click.echo(f"\r\x1b[K{text}" if is_terminal else text, err=True, nl=not is_terminal)
