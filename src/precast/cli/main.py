"""The command line: each command parses its arguments, calls functions of the packages below, and prints the result.

Invariants: nothing heavy is imported until a command runs, so `--help` and `--version` answer at once. Results go to
stdout and progress to stderr, so `--json` prints one object and nothing else. `exit_codes.py` has the exit codes.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from precast._internal.missing import missing_requirement
from precast._internal.version import __version__
from precast.cli import (
    build_command,
    compare_command,
    export_command,
    run_command,
    try_command,
    tune_command,
)
from precast.cli.exit_codes import ExitCode
from precast.cli.options import (
    device_option,
    dtype_option,
    file_option,
    json_option,
    policy_option,
    seed_option,
)
from precast.errors import PolicyError, PrecastError

__all__ = ["main"]


class _Commands(click.Group):
    """The commands, with those of other distributions; a `PrecastError` is one message on stderr and no traceback.

    Another distribution names its commands in the entry point group `precast.commands`: that of precast-lint is
    `precast check`. Nothing of it is imported before its command, or the help text, is requested.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(point.name for point in _entry_points())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        for point in _entry_points() if command is None else ():
            with suppress(ImportError, AttributeError):  # of another version
                command = point.load() if point.name == cmd_name else command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            if name == "check":
                raise click.ClickException(
                    "`precast check` is a command of precast-lint, which is not installed or does not fit this "
                    "precast. Install both from one clone of precast: pip install . ./lint"
                )
            raise click.UsageError(f"no command {name!r}{_suggestion(args, self, ctx)}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PolicyError as error:  # an unknown policy is a usage error
            raise click.UsageError(str(error)) from error
        except PrecastError as error:
            raise click.ClickException(str(error)) from error
        except ModuleNotFoundError as error:
            missing = missing_requirement(f"precast {ctx.invoked_subcommand}", error)
            if missing is None:
                raise
            raise click.ClickException(str(missing)) from error

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except BaseException as error:
            module = sys.modules.get("precast.running.exit_status")  # None where no program was run
            if module is None or not isinstance(error, module.Interrupted):
                raise
            # Click would exit with code 1. Python must die of the signal; the traceback has been printed.
            sys.excepthook = lambda *_: None
            raise KeyboardInterrupt from None


def _entry_points() -> Any:
    from importlib.metadata import entry_points

    return entry_points(group="precast.commands")


def _suggestion(args: list[str], group: click.Group, ctx: click.Context) -> str:
    """Return the end of an error about an unknown command: the likely one, or how to run a script."""
    import difflib

    name = args[0]
    if name.endswith(".py") or Path(name).is_file():
        return f"; to run a script, write `{shlex.join(['precast', 'run', *args])}`"
    near = difflib.get_close_matches(name, group.list_commands(ctx), n=2)
    return f"; did you mean {' or '.join(near)}?" if near else ""


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="precast")
def main() -> None:
    """A replacement for torch.amp whose precision table you can edit."""


main.add_command(build_command.build)
main.add_command(compare_command.compare)
main.add_command(run_command.run)
main.add_command(export_command.export)
main.add_command(try_command.try_)
main.add_command(tune_command.tune)


@main.command(short_help="Train in float32 and in mixed precision, and compare.")
@click.option("--size", type=int, help="Pixels along a side.")
@click.option("--steps", type=click.IntRange(min=10), help="Training steps of each run.")
@device_option("cuda if there is one")
@dtype_option
@seed_option
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("precast-demo.png"),
    show_default=True,
    help="File of the picture.",
)
def demo(
    *,
    size: int | None,
    steps: int | None,
    device: str | None,
    dtype: str | None,
    seed: int,
    out: Path,
) -> None:
    """Train a network in float32 and in mixed precision, and compare the two.

    The network learns the image of a checkerboard from its coordinates. Without --size and --steps
    it takes about a minute on two CPU cores.
    """
    _require_torch()
    from rich.console import Console
    from rich.progress import Progress

    from precast._internal import atomic_write
    from precast.cli.demo import display, example

    display.require_matplotlib()
    with _usage_errors():
        task, dtype_, default_steps = example.demo_task(device, dtype, size)
    steps = steps or default_steps
    if refusal := atomic_write.foreign_file_error(out, "--out"):
        raise click.UsageError(refusal)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        progress_task = bar.add_task("float32 and mixed precision, alternately", total=steps)
        result = example.train_both(task, dtype_, steps, seed, lambda: bar.advance(progress_task))
    atomic_write.replace_own(out, display.picture_png(result))
    Console().print(display.render(result))
    click.echo(f"\npicture: {out}")
    failure = display.failure(result)
    if failure is not None:
        raise click.ClickException(failure)


@main.command(short_help="Measure how fast this machine is in each dtype.")
@json_option
def doctor(as_json: bool) -> None:
    """Measure how fast this machine is in each dtype, and advise which one to use.

    It also says which engine of precast's runs; if that is the slower one, why, and what to do.
    """
    _require_torch()
    from rich.console import Console

    from precast.diagnostics.hardware import doctor as doctor_

    console = Console(stderr=True)
    with console.status("measuring") as status:
        diagnosis = doctor_.diagnose(lambda what: status.update(f"measuring {what}"))
    if as_json:
        _print_json(diagnosis.to_dict())
    else:
        Console().print(doctor_.render(diagnosis))


@main.command(short_help="Show the effect of a policy on a model or an operation.")
@click.argument("operation", required=False)
@click.option("--model", metavar="MODULE:FACTORY", help="The function that makes the model.")
@click.option(
    "--example",
    metavar="MODULE:NAME",
    help="An input of the model, or a function that gives one: the model is run on it once.",
)
@policy_option("default")
@device_option("cpu and cuda, for an operation")
@click.option("--module", help="Name of the module in which the operation runs.")
@file_option("--exported", text="A file of `precast export`: show its operations and dtypes.")
@click.option(
    "--diff",
    nargs=2,
    metavar="A B",
    help="Compare two policies, as in --diff torch@2.11 torch@2.12, or two files of `precast export`.",
)
@json_option
def explain(
    *,
    diff: tuple[str, str] | None,
    operation: str | None,
    exported: Path | None,
    model: str | None,
    example: str | None,
    policy: str,
    device: str | None,
    module: str | None,
    as_json: bool,
) -> None:
    """Show the effect of a policy on one OPERATION, or on each module of a model.

    For an operation: its rule and the reason. For a model: the precision of each module, the rule that decides it,
    and the rules that match nothing. With an --example the model is run on it once, and what each
    module ran is shown. The example is the model's argument, a tuple of its arguments, or a dict
    of its keyword arguments.

    With --diff: the operations whose rule differs between two policies, on which devices, and the
    effect on dtypes and memory; or the operations and weights that have other dtypes in two files of
    `precast export`. The exit code is then 0 if nothing differs, else 1.
    """
    others = [operation, model, example, device, module]
    if (any(others) and (diff or exported)) or (diff and exported):
        raise click.UsageError(
            "--diff and --exported cannot be combined with other options than --json."
        )
    if not (diff or exported):
        if (operation is None) == (model is None):
            raise click.UsageError(
                "Name an operation, as in `precast explain softmax`, or a --model."
            )
        if model is not None and (device or module):
            raise click.UsageError("--device and --module go with an operation, not with --model.")
        if model is None and example is not None:
            raise click.UsageError("--example is an input of a model: it goes with --model.")
    _require_torch()
    if diff is not None:
        _explain_difference(*diff, as_json)
        return
    if exported is not None:
        export_command.explain_file(exported, as_json)
        return
    from rich.console import Console

    from precast.cli import python_objects
    from precast.diagnostics.explain import model as explain_
    from precast.diagnostics.explain import operation as operation_
    from precast.policy.policy import Policy

    chosen = Policy.load(policy)
    report: explain_.ModelReport | operation_.OperationReport
    if model is not None:
        with _usage_errors():
            network = python_objects.load_model(model)
            examples = () if example is None else (python_objects.load_example(example),)
        report = explain_.explain_model(network, chosen, *examples)
    else:
        devices = (device.partition(":")[0],) if device else ("cpu", "cuda")
        report = operation_.explain_operation(str(operation), chosen, devices, module)
    if as_json:
        _print_json(report.to_dict())
    else:
        Console().print(report.render())


def _explain_difference(before: str, after: str, as_json: bool) -> None:
    """Print the differences of two policies, or of two exported programs, and exit with 0 if there are none, else 1."""
    import zipfile

    # A file of `precast export` has a zip format; a missing one is known by its name.
    programs = {name.endswith(".pt2") or zipfile.is_zipfile(name) for name in (before, after)}
    if programs == {True}:
        export_command.explain_difference(Path(before), Path(after), as_json)
    if True in programs:
        raise click.UsageError(
            f"--diff: {before} and {after} are a policy and an exported program. Name two of a kind."
        )
    from rich.console import Console

    from precast.policy.difference import explain_difference

    difference = explain_difference(before, after)
    if as_json:
        _print_json(difference.to_dict())
    else:
        Console().print(difference.render())
    sys.exit(ExitCode.NO if difference else ExitCode.YES)


def _require_torch() -> None:
    """Raise an error for a PyTorch that is too old, before other imports fail."""
    from precast import _torch  # noqa: F401


def _print_json(value: dict[str, Any]) -> None:
    import json

    click.echo(json.dumps(value, indent=2))


@contextmanager
def _usage_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error
