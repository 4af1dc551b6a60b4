"""The command `precast tune`: a search for the best policy of a model on this machine.

Invariants: files that `precast tune` did not write are never replaced; Ctrl-C writes the best policy that is proven by
then, and the exit code is 1.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from precast.cli.exit_codes import ExitCode
from precast.cli.options import json_option, seed_option

if TYPE_CHECKING:
    from precast.cli.tune_inputs import Inputs
    from precast.policy.policy import Policy
    from precast.tuning.checking import CheckQuestion
    from precast.tuning.options import TuningProgress
    from precast.tuning.result import TuningResult

__all__ = ["tune"]

_ARGUMENTS: Final = "precast.tune.arguments"
_MINUTE: Final = 60.0
_OUTCOMES: Final = {
    "holds": "it holds here",
    "does not hold": "it does not hold here",
    "cannot tell": "could not tell whether it holds here",
}
_SEARCH_CODES: Final = {
    "proven": ExitCode.YES,
    "interrupted": ExitCode.NO,
    "undecided": ExitCode.UNDECIDED,
}
_CHECK_CODES: Final = {
    "holds": ExitCode.YES,
    "does not hold": ExitCode.NO,
    "cannot tell": ExitCode.UNDECIDED,
}


class _Tune(click.Command):
    """Keeps the arguments as they were written, for the head of the file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = shlex.join(["precast", "tune", *args])
        return super().parse_args(ctx, args)


@click.command(cls=_Tune, short_help="Find the best policy for a model on this machine.")
@click.argument("model", metavar="MODULE:FACTORY", required=False)
@click.option(
    "--data",
    metavar="MODULE:NAME",
    help="The batches: a list, a data loader, or a function that returns one.",
)
@click.option(
    "--loss",
    metavar="MODULE:NAME",
    help="A function of output and target, for batches that are pairs of input and target.",
)
@click.option(
    "--step", metavar="MODULE:NAME", help="A function of model and batch that returns the loss."
)
@click.option(
    "--optimizer",
    metavar="OPTIMIZER",
    help="One of torch.optim, such as SGD,lr=0.1, or MODULE:FUNCTION.  [default: AdamW]",
)
@click.option(
    "--objective",
    type=click.Choice(["time", "memory"]),
    default="time",
    show_default=True,
    help="Quantity to minimize: the time of a step or run, or the memory that it needs.",
)
@click.option(
    "--tolerance",
    default="1%",
    show_default=True,
    help="Allowed increase of the loss or metric over float32.",
)
@click.option(
    "--budget",
    default="5m",
    show_default=True,
    help="Most time of the search; one that is too short for any comparison is refused.",
)
@click.option(
    "--candidates",
    default="bfloat16",
    show_default=True,
    help="16-bit dtypes and float8 rules, separated by commas.",
)
@click.option(
    "--metric",
    metavar="MODULE:NAME",
    help="A function of model and batch, compared after training, or alone for inference; smaller is better.",
)
@click.option(
    "--base",
    default="default",
    show_default=True,
    help="The policy to change: a preset or a policy file.",
)
@seed_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("tuned.toml"),
    show_default=True,
    help="Policy file; the evidence is written next to it.",
)
@click.option(
    "--report",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Output file of the report.  [default: next to --out]",
)
@click.option(
    "--check",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measure this policy again, in 1m, and search nothing.",
)
@json_option
def tune(
    *,
    model: str | None,
    out: Path,
    page: Path | None,
    check: Path | None,
    as_json: bool,
    objective: Any,
    base: str,
    seed: int,
    tolerance: str,
    budget: str,
    candidates: str,
    **named: Any,
) -> None:
    """Find the operations of a model that should run in 16 bits on this machine.

    Copies of the model are trained in float32, under the base policy, under the policy that was
    found and under presets, from the same seeds on the same batches. The answer is the best one
    that is proven, with a reason and figures for each row. A name without a module is looked up in
    the model's module.

    With a --metric, and neither --loss nor --step, the answer is for inference: copies are run on
    the batches without gradients, and compared by the metric.

    Ctrl-C ends the search, writes the best policy that is proven by then, and exits with code 1.

    The exit code is 0 if the answer is proven. It is 4 if the answer, float32, is undecided: the
    output then names the changes that would decide it.

    With --check nothing is searched or written: a policy is measured again beside float32 and the
    policy that it was made from. The exit code is 0 if it still holds, 1 if it does not, and 4 if
    that is undecided.
    """
    _refuse(model, named)
    is_explicit = click.get_current_context().get_parameter_source
    from precast import _torch  # noqa: F401 -- first, as it refuses a PyTorch that is too old
    from precast.cli import tune_inputs
    from precast.policy.policy import as_policy
    from precast.tuning import tuner
    from precast.tuning.options import TuningOptions
    from precast.tuning.result import evidence_of

    page_path = page or out.with_suffix(".html")
    makes_page = False
    if check is None:
        _check_replaceable(out)
        makes_page = _check_page(page_path, is_needed=page is not None)
    elif not check.is_file():
        raise click.UsageError(f"--check {check}: file not found")
    try:
        inputs = tune_inputs.inputs(model=str(model), **named)
        settings: dict[str, Any] = {
            "tolerance": tune_inputs.tolerance(tolerance),
            "budget": tune_inputs.budget(budget),
            "candidates": tune_inputs.candidates(candidates),
        }
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if check is not None:
        settings |= {"objective": objective, "base": base}
        explicit = {
            name: value
            for name, value in settings.items()
            if is_explicit(name) == ParameterSource.COMMANDLINE
        }
        _check(check, inputs, explicit, seed, as_json)
        return
    with _progress_bar() as progress:
        options = TuningOptions(
            candidates=settings.pop("candidates"),
            base=as_policy(base),
            metric=inputs.metric,
            seed=seed,
            progress=progress,
        )
        result = tuner.tune(
            inputs.model,
            inputs.step,
            inputs.batches,
            optimizer=inputs.optimizer,
            objective=objective,
            options=options,
            **settings,
        )
    evidence_of(result).command = click.get_current_context().meta[_ARGUMENTS]
    result.save(out, page=page_path if makes_page else False)
    paths = {"policy": out, "evidence": out.with_suffix(".json")}
    _print(result, {**paths, **({"page": page_path} if makes_page else {})}, as_json)
    sys.exit(_SEARCH_CODES[result.outcome])


def _check(path: Path, inputs: Inputs, explicit: dict[str, Any], seed: int, as_json: bool) -> None:
    """Measure the policy in a file again, and exit with a code that shows if it holds."""
    from rich.console import Console

    from precast._internal.display import terminal_width
    from precast.policy.policy import Policy
    from precast.tuning import checking
    from precast.tuning.tables import figures_of, table_lines, wrapped

    policy = Policy.load(path)
    question = _question(policy, explicit)
    with Console(stderr=True).status("measuring") as status:
        result = checking.check(inputs.workload(seed), policy, question, status.update)
    if as_json:
        content = {"policy": str(path), "outcome": result.outcome, "because": result.because}
        click.echo(json.dumps({**content, "trials": figures_of(result.proof)}, indent=2))
    else:
        width = terminal_width(sys.__stdout__)
        lines = [f"{path}: {_OUTCOMES[result.outcome]}"]
        for reason in result.because:
            lines += wrapped(reason, width, "- ", "  ")
        click.echo("\n".join([*lines, "", *table_lines(result.proof, inputs.task, width)]))
    sys.exit(_CHECK_CODES[result.outcome])


def _question(policy: Policy, explicit: dict[str, Any]) -> CheckQuestion:
    """Return the question in the policy's file, with the options of the command line in place of its parts."""
    import torch

    from precast.policy.policy import as_policy
    from precast.policy.values import canonical_dtype
    from precast.tuning.checking import CheckQuestion

    measured = policy.measured
    dtype = getattr(torch, canonical_dtype(measured.get("dtype", "bfloat16")) or "", None)
    if "candidates" in explicit:
        dtypes = (c for c in explicit["candidates"] if isinstance(c, torch.dtype))
        dtype = next(dtypes, torch.bfloat16)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise click.UsageError(
            f"the policy was measured in {measured['dtype']}; allowed: float32, bfloat16, float16"
        )
    return CheckQuestion(
        explicit.get("objective", "memory" if measured.get("objective") == "memory" else "time"),
        float(explicit.get("tolerance", measured.get("tolerance", 0.01))),
        explicit.get("budget", _MINUTE),
        dtype,
        as_policy(str(explicit.get("base", measured.get("base", "default")))),
    )


def _refuse(model: str | None, named: dict[str, Any]) -> None:
    """Refuse a command with missing options, before anything heavy is imported."""
    if model is None or named["data"] is None:
        raise click.UsageError("Name a model and its --data, such as my_model:make --data batches.")
    if named["loss"] is not None and named["step"] is not None:
        raise click.UsageError(
            "Name either a --loss of output and target, or a --step of model and batch."
        )
    if named["loss"] is None and named["step"] is None:
        if named["metric"] is None:
            raise click.UsageError(
                "Name either a --loss of output and target, or a --step of model and batch; for inference, a --metric "
                "alone."
            )
        if named["optimizer"] is not None:
            raise click.UsageError(
                "--optimizer is for training: name a --loss or a --step, or leave it out for inference."
            )


def _check_replaceable(out: Path) -> None:
    """Refuse a path with another file, before minutes are spent."""
    from precast.tuning.result import is_a_result

    if out.suffix == ".json":
        raise click.UsageError(
            f"--out {out}: expected a TOML file; the evidence next to it is the JSON file"
        )
    for path in (out, out.with_suffix(".json")):
        if path.is_dir() or (path.is_file() and path.stat().st_size and not is_a_result(path)):
            raise click.UsageError(
                f"cannot write {path}: precast tune did not write the existing file; name another file with --out"
            )
    if not out.parent.is_dir():
        raise click.UsageError(f"cannot write {out}: folder {out.parent} not found")


def _check_page(path: Path, *, is_needed: bool) -> bool:
    """Return True if a page can be made; refuse a path with another file."""
    from precast._internal import atomic_write
    from precast.errors import MissingExtraError
    from precast.report.page import needed

    if atomic_write.is_not_ours(path):
        raise click.UsageError(
            f"cannot write {path}: {atomic_write.NOT_OURS}; name another with --report"
        )
    if not path.parent.is_dir():
        raise click.UsageError(f"cannot write {path}: folder {path.parent} not found")
    try:
        needed()
    except MissingExtraError as error:
        if is_needed:
            raise
        click.echo(f"No page will be written: {error}", err=True)
        return False
    return True


@contextmanager
def _progress_bar() -> Iterator[Callable[[TuningProgress], None]]:
    """Show the progress of a search on stderr: a bar, or without a terminal a line for each part."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        stages: set[str] = set()

        def line(now: TuningProgress) -> None:
            if now.stage not in stages and now.stage != "done":
                stages.add(now.stage)
                click.echo(f"{now.seconds:5.0f} s  {_WORDS[now.stage]}", err=True)

        yield line
        return
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        running = bar.add_task("", total=None)

        def show(now: TuningProgress) -> None:
            text = f"{_WORDS[now.stage]}: {now.text}"
            width = max(20, console.width - 62)
            text = text if len(text) <= width else text[: width - 1] + "…"
            bar.update(
                running,
                description=f"{text}  [bold]best: {now.best}[/bold]",
                completed=min(now.seconds, now.budget),
                total=now.budget,
            )

        yield show


_WORDS: Final = {
    "record": "recording",
    "errors": "measuring errors",
    "costs": "measuring time and memory",
    "prove": "proving",
    "done": "done",
}


def _print(result: TuningResult, files: dict[str, Path], as_json: bool) -> None:
    paths = {kind: str(path) for kind, path in files.items()}
    if as_json:
        click.echo(json.dumps({**result.to_dict(), **paths}, indent=2))
        return
    click.echo(f"{result}\n")
    for kind, path in paths.items():
        click.echo(f"{kind:<8} {path}")
