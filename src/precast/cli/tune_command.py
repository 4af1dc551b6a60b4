"""The command `precast tune`: a search for the best policy of a model on this machine.

Invariants: files that `precast tune` did not write are never replaced; Ctrl-C writes the best policy that is proven by
then, and the exit code is 1.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from precast.cli.exit_codes import ExitCode
from precast.cli.options import file_option, json_option, seed_option

if TYPE_CHECKING:
    from rich.status import Status

    from precast.tuning.options import TuningProgress

__all__ = ["tune"]

_ARGUMENTS: Final = "precast.tune.arguments"
_OUTCOMES: Final = {
    "holds": ("it holds here", ExitCode.YES),
    "does not hold": ("it does not hold here", ExitCode.NO),
    "cannot tell": ("could not tell whether it holds here", ExitCode.UNDECIDED),
}
_SEARCH_CODES: Final = {
    "proven": ExitCode.YES,
    "interrupted": ExitCode.NO,
    "undecided": ExitCode.UNDECIDED,
}
_STAGES: Final = {
    "record": "recording",
    "errors": "measuring errors",
    "costs": "measuring time and memory",
    "prove": "proving",
}


class _Tune(click.Command):
    """Keeps the arguments as they were written, for the head of the file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = shlex.join(["precast", "tune", *args])
        return super().parse_args(ctx, args)


def _object_option(name: str, text: str) -> Callable[[Any], Any]:
    """Return an option that names an object; a name without a module is looked up in the model's."""
    return click.option(name, metavar="MODULE:NAME", help=text)


def _text_option(name: str, default: str, text: str) -> Callable[[Any], Any]:
    return click.option(name, default=default, show_default=True, help=text)


@click.command(cls=_Tune, short_help="Find the best policy for a model on this machine.")
@click.argument("model", metavar="MODULE:FACTORY", required=False)
@_object_option("--data", "The batches: a list, a data loader, or a function that returns one.")
@_object_option("--loss", "A function of output and target, for batches that are such pairs.")
@_object_option("--step", "A function of model and batch that returns the loss.")
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
@_text_option("--tolerance", "1%", "Allowed increase of the loss or metric over float32.")
@_text_option("--budget", "5m", "Most time of the search; one that is too short is refused.")
@_text_option(
    "--candidates", "bfloat16", "16-bit dtypes and rules for products, separated by commas."
)
@_object_option(
    "--metric",
    "A function of model and batch, compared after training, or alone for inference; smaller is better.",
)
@_text_option("--base", "default", "The policy to change: a preset or a policy file.")
@seed_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("tuned.toml"),
    show_default=True,
    help="Policy file; the evidence is written next to it.",
)
@file_option("--report", "page", text="Output file of the report.  [default: next to --out]")
@file_option("--check", "policy_file", text="Measure this policy again, in 1m, and search nothing.")
@json_option
def tune(
    *,
    model: str | None,
    out: Path,
    page: Path | None,
    policy_file: Path | None,
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
    _check_named(model, named)
    from precast import _torch  # noqa: F401 -- first, as it refuses a PyTorch that is too old

    if policy_file is not None and not policy_file.is_file():
        raise click.UsageError(f"--check {policy_file}: file not found")
    paths = _output_paths(out, page) if policy_file is None else {}
    from rich.console import Console

    from precast.cli import tune_inputs
    from precast.policy.policy import as_policy
    from precast.tuning import tuner
    from precast.tuning.options import TuningOptions, checked_candidates

    try:
        inputs = {**tune_inputs.inputs(model=str(model), **named), "seed": seed}
        options: dict[str, Any] = {
            "tolerance": tune_inputs.tolerance(tolerance),
            "budget": tune_inputs.budget(budget),
            "candidates": checked_candidates(candidates.split(",")),
            "objective": objective,
            "base": base,
        }
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    context = click.get_current_context()
    if policy_file is not None:
        defaults = [
            name
            for name in options
            if context.get_parameter_source(name) != ParameterSource.COMMANDLINE
        ]
        _check(
            policy_file, inputs, {k: v for k, v in options.items() if k not in defaults}, as_json
        )
    with Console(stderr=True).status("") as status:
        rare = TuningOptions(
            candidates=options.pop("candidates"),
            base=as_policy(options.pop("base")),
            metric=inputs.pop("metric"),
            seed=inputs.pop("seed"),
            progress=_shown_on(status),
        )
        result = tuner.tune(**inputs, **options, options=rare)
    tuner.evidence_of(result).command = context.meta[_ARGUMENTS]
    result.save(out, page=paths.get("page", False))
    files = {kind: str(path) for kind, path in paths.items()}
    if as_json:
        click.echo(json.dumps({**result.to_dict(), **files}, indent=2))
    else:
        lines = [f"{kind:<8} {path}" for kind, path in files.items()]
        click.echo("\n".join([f"{result}\n", *lines]))
    sys.exit(_SEARCH_CODES[result.outcome])


def _check(path: Path, inputs: dict[str, Any], explicit: dict[str, Any], as_json: bool) -> None:
    """Measure the policy in a file again, and exit with a code that shows if it holds.

    Options that the command line names explicitly replace those with which the policy was found.
    """
    import torch
    from rich.console import Console

    from precast._internal.display import terminal_width, wrapped
    from precast.policy.policy import Policy, as_policy
    from precast.tuning import checking
    from precast.tuning.evidence import figures_of, table_lines
    from precast.tuning.setups import workload_of

    policy = Policy.load(path)
    question: dict[str, Any] = {"objective": "time", "tolerance": 0.01, "budget": 60.0}
    question |= {"base": "default", "dtype": "bfloat16", **policy.measured, **explicit}
    dtypes = [each for each in explicit.get("candidates", ()) if isinstance(each, torch.dtype)]
    workload = workload_of(**inputs)
    with Console(stderr=True).status("measuring") as status:
        result = checking.check(
            workload,
            policy,
            base=as_policy(question["base"]),
            dtype=dtypes[0] if dtypes else getattr(torch, question["dtype"]),
            objective=question["objective"],
            tolerance=question["tolerance"],
            budget=question["budget"],
            progress=status.update,
        )
    text, code = _OUTCOMES[result.outcome]
    if as_json:
        content = {"policy": str(path), "outcome": result.outcome, "because": result.because}
        click.echo(json.dumps({**content, "trials": figures_of(result.proof)}, indent=2))
    else:
        width = terminal_width(sys.__stdout__)
        lines = [f"{path}: {text}"]
        for reason in result.because:
            lines += wrapped(reason, width, "- ", "  ")
        click.echo("\n".join([*lines, "", *table_lines(result.proof, workload.task, width)]))
    sys.exit(code)


def _check_named(model: str | None, named: dict[str, Any]) -> None:
    """Refuse a command with missing options, before anything heavy is imported."""
    trained = [name for name in ("loss", "step") if named[name] is not None]
    if model is None or named["data"] is None:
        raise click.UsageError("Name a model and its --data, such as my_model:make --data batches.")
    if len(trained) > 1 or not (trained or named["metric"]):
        raise click.UsageError(
            "Name either a --loss of output and target, or a --step of model and batch; for inference, a --metric "
            "alone."
        )
    if not trained and named["optimizer"] is not None:
        raise click.UsageError(
            "--optimizer is for training: name a --loss or a --step, or leave it out for inference."
        )


def _output_paths(out: Path, page: Path | None) -> dict[str, Path]:
    """Return the files to write, by kind. Refuse paths of other files, before minutes are spent."""
    from precast._internal import atomic_write
    from precast.errors import MissingExtraError
    from precast.report.page import needed

    if out.suffix == ".json":
        raise click.UsageError(
            f"--out {out}: expected a TOML file; the evidence next to it is the JSON file"
        )
    paths = {"policy": out, "evidence": out.with_suffix(".json")}
    paths["page"] = page or out.with_suffix(".html")
    for kind, path in paths.items():
        if error := atomic_write.foreign_file_error(
            path, "--report" if kind == "page" else "--out"
        ):
            raise click.UsageError(error)
    try:
        needed()
    except MissingExtraError as error:
        if page is not None:
            raise
        click.echo(f"No page will be written: {error}", err=True)
        del paths["page"]
    return paths


def _shown_on(status: Status) -> Callable[[TuningProgress], None]:
    """Return a function that shows the progress of a search; without a terminal, a line for each stage."""
    stages: set[str] = set()

    def show(now: TuningProgress) -> None:
        words = _STAGES.get(now.stage, "done")
        if status.console.is_terminal:
            time = f"{now.seconds:.0f} of {now.budget:.0f} s"
            status.update(f"{time}  {words}: {now.text}  [bold]best: {now.best}[/bold]")
        elif now.stage not in {*stages, "done"}:
            stages.add(now.stage)
            click.echo(f"{now.seconds:5.0f} s  {words}", err=True)

    return show
