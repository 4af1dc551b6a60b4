"""The command `precast tune`, which finds a policy for a model on this machine, and proves it.

Invariants: files that are no policy of `precast tune` are never replaced; Ctrl-C writes the best that is proven until
then with its evidence, and the exit code is then 1; an undecided
comparison ends with the exit code 4; an earlier result is only replaced by one for which more is known.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from precast.cli.tune_inputs import Inputs
    from precast.policy.policy import Policy
    from precast.tuning.checking import Question
    from precast.tuning.result import TuningResult
    from precast.tuning.tuner import Progress

__all__ = ["tune"]

_ARGUMENTS: Final = "precast.tune.arguments"
_MINUTE: Final = 60.0
_OUTCOMES: Final = {
    "holds": "it holds here",
    "does not hold": "it does not hold here",
    "cannot tell": "could not tell whether it holds here",
}
_UNDECIDED: Final = 4
"""The exit code of a comparison that is undecided."""


class _Tune(click.Command):
    """Remembers its arguments as they were written, for the head of the file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = shlex.join(["precast", "tune", *args])
        return super().parse_args(ctx, args)


@click.command(cls=_Tune, short_help="Find the best policy for a model here, and prove it.")
@click.argument("model", metavar="MODULE:FACTORY", required=False)
@click.option(
    "--data", metavar="MODULE:NAME", help="The batches: a list, a loader, or a function of one."
)
@click.option(
    "--loss",
    metavar="MODULE:NAME",
    help="A function of output and target, for batches that are such pairs.",
)
@click.option(
    "--step", metavar="MODULE:NAME", help="A function of model and batch that returns the loss."
)
@click.option(
    "--optimizer",
    metavar="OPTIMIZER",
    help="One of torch.optim, as SGD,lr=0.1, or MODULE:FUNCTION.  [default: AdamW]",
)
@click.option(
    "--objective",
    type=click.Choice(["time", "memory"]),
    default="time",
    show_default=True,
    help="What is made small: the time of a step or run, or the memory that it needs.",
)
@click.option(
    "--tolerance",
    default="1%",
    show_default=True,
    help="How much worse than in float32 the loss or metric may be.",
)
@click.option(
    "--budget",
    default="5m",
    show_default=True,
    help="How long it may take; a time in which nothing can be compared is refused.",
)
@click.option(
    "--candidates",
    default="bfloat16",
    show_default=True,
    help="16-bit dtypes and float8 rules, with commas.",
)
@click.option(
    "--metric",
    metavar="MODULE:NAME",
    help="A function of model and batch, compared after training, or alone for inference; smaller is better.",
)
@click.option("--base", default="default", show_default=True, help="The policy that is changed.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of all that is random.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("tuned.toml"),
    show_default=True,
    help="The policy's file; the evidence is written beside it.",
)
@click.option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the page here.  [default: beside --out]",
)
@click.option(
    "--check",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measure this policy again, in 1m, for what it was found for.",
)
@click.option(
    "--prepare",
    metavar="MODULE:NAME",
    help="A function that wraps or shards each copy that is trained, as under torchrun.",
)
@click.option(
    "--study",
    metavar="FILE",
    help="A journal of Optuna that other machines share, and train some of the seeds.",
)
@click.option(
    "--worker", is_flag=True, help="Train seeds for the search in --study, and write nothing."
)
@click.option("--resume", is_flag=True, help="Go on from the evidence beside --out.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tune(
    *,
    model: str | None,
    out: Path,
    page: Path | None,
    check: Path | None,
    resume: bool,
    as_json: bool,
    objective: Any,
    base: str,
    seed: int,
    tolerance: str,
    budget: str,
    candidates: str,
    study: str | None,
    worker: bool,
    **named: Any,
) -> None:
    """Find which operations of a model are to run in 16 bits on this machine, and prove it.

    Copies of the model are trained in float32, under the base policy and under those that were
    found, from the same seeds on the same batches. The answer is the best one that is proven, with
    a reason and figures for each operation that is held back. A name without a module is looked
    for in the model's.

    With a --metric, and neither --loss nor --step, it is the policy for inference: copies are run
    on the batches without gradients, and compared by the metric.

    Ctrl-C ends the search: what is proven by then is written, and the exit code is 1; --resume
    goes on from there.

    Under torchrun all processes train together, and the first one writes. With --study, the same
    command with --worker on other machines trains some of the seeds.

    The exit code is 0 where the answer is proven, and 4 where it is undecided: the answer is then
    float32, and what would decide it is printed.

    With --check nothing is searched or written: a policy is measured again beside float32 and the
    policy that it was made from. The exit code is then 0 where it still holds, 1 where it does
    not, and 4 where that is undecided.
    """
    _refuse(model, named)
    if worker and (study is None or check is not None or resume):
        raise click.UsageError("--worker needs a --study, and neither --check nor --resume.")
    given_here = click.get_current_context().get_parameter_source
    from precast import _torch  # noqa: F401 -- first, as it refuses a PyTorch that is too old
    from precast.cli import tune_inputs
    from precast.policy.policy import as_policy
    from precast.tuning import tuner

    evidence = out.with_suffix(".json")
    shown = page or out.with_suffix(".html")
    makes_page = False
    if check is None and not worker:
        _check_replaceable(out, resume)
        makes_page = _check_page(shown, is_needed=page is not None)
    elif check is not None and not check.is_file():
        raise click.UsageError(f"--check {check}: there is no such file")
    elif resume:
        raise click.UsageError("--check searches nothing that --resume could go on with.")
    rank = click.get_current_context().with_resource(_processes())
    if rank is not None and check is not None:
        raise click.UsageError("--check measures in one process: run it without torchrun.")
    try:
        given = tune_inputs.inputs(model=str(model), **named)
        settings: dict[str, Any] = {
            "tolerance": tune_inputs.tolerance(tolerance),
            "budget": tune_inputs.budget(budget),
            "candidates": tune_inputs.candidates(candidates),
        }
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if check is not None:
        asked = {"objective": objective, "base": base, **settings}
        told_here = {name for name in asked if given_here(name) == ParameterSource.COMMANDLINE}
        checked = {name: value for name, value in asked.items() if name in told_here}
        _check(check, given, {**checked, "seed": seed}, as_json)
        return
    with _shown() if not rank else nullcontext() as told:
        found = tuner.tune(
            given.model,
            given.step,
            given.batches,
            optimizer=given.optimizer,
            metric=given.metric,
            objective=objective,
            base=as_policy(base),
            seed=seed,
            resume=evidence if resume else None,
            progress=told,
            prepare=given.prepare,
            study=study,
            worker=worker,
            **settings,
        )
    if not found.is_saved_here:
        if worker:
            click.echo(f"The search has ended: {found.name}: {found.because}", err=True)
        return
    found.evidence.command = click.get_current_context().meta[_ARGUMENTS]
    is_kept = resume and not found.evidence.proofs and _knows_more(evidence)
    if is_kept:
        click.echo(f"Nothing new was proven, so {out} stays as it is.", err=True)
    else:
        found.save(out, page=shown if makes_page else False)
    written = {"policy": out, "evidence": evidence, **({"page": shown} if makes_page else {})}
    _print(found, written, as_json)
    if found.evidence.interrupted:
        click.echo("Interrupted. The same command with --resume goes on.", err=True)
    sys.exit({"proven": 0, "interrupted": 1, "undecided": _UNDECIDED}[found.outcome])


def _check(path: Path, given: Inputs, asked: dict[str, Any], as_json: bool) -> None:
    """Measures the policy in a file again, and ends with an exit code that says whether it holds."""
    from rich.console import Console

    from precast.policy.policy import Policy
    from precast.tuning import checking
    from precast.tuning.result import figures, table

    policy = Policy.load(path)
    seed = asked.pop("seed")
    question = _question(policy, asked)
    workload = given.workload(seed)
    with Console(stderr=True).status("measuring") as status:
        found = checking.check(workload, policy, question, status.update)
    proofs = [] if found.proof is None else [found.proof]
    if as_json:
        trials = [figures(trial) for proof in proofs for trial in proof.trials]
        said = {"policy": str(path), "outcome": found.outcome, "because": found.because}
        click.echo(json.dumps({**said, "trials": trials}, indent=2))
    else:
        click.echo(f"{path}: {_OUTCOMES[found.outcome]}")
        for reason in found.because:
            click.echo(f"- {reason}")
        for proof in proofs:
            click.echo("\n" + "\n".join(table(proof, given.task)))
    sys.exit({"holds": 0, "does not hold": 1, "cannot tell": _UNDECIDED}[found.outcome])


def _question(policy: Policy, asked: dict[str, Any]) -> Question:
    """What the policy was found for, as its file says, but for what is asked here."""
    import torch

    from precast.policy.policy import as_policy
    from precast.policy.values import canonical_dtype
    from precast.tuning.checking import Question

    said = policy.measured
    dtype = getattr(torch, canonical_dtype(said.get("dtype", "bfloat16")) or "", None)
    if "candidates" in asked:
        dtypes = (c for c in asked["candidates"] if isinstance(c, torch.dtype))
        dtype = next(dtypes, torch.bfloat16)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise click.UsageError(f"the policy was measured in {said['dtype']}, which is no 16 bits")
    return Question(
        asked.get("objective", "memory" if said.get("objective") == "memory" else "time"),
        float(asked.get("tolerance", said.get("tolerance", 0.01))),
        asked.get("budget", _MINUTE),
        dtype,
        as_policy(str(asked.get("base", said.get("base", "default")))),
    )


def _refuse(model: str | None, named: dict[str, Any]) -> None:
    """Refuses a command that leaves out what it needs, before anything heavy is imported."""
    if model is None or named["data"] is None:
        raise click.UsageError("Name a model and its --data, as in my_model:make --data batches.")
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


def _check_replaceable(out: Path, resume: bool) -> None:
    """Refuses a place where something else is, before minutes are spent; and to go on from nothing."""
    from precast.tuning.result import is_a_result

    if out.suffix == ".json":
        raise click.UsageError(f"--out {out} is to be a TOML file: the evidence beside it is JSON.")
    for path in (out, out.with_suffix(".json")):
        if path.is_dir() or (path.is_file() and path.stat().st_size and not is_a_result(path)):
            raise click.UsageError(
                f"cannot write {path}: it is nothing that precast tune has written, and is not written over; name "
                "another file with --out"
            )
    if not out.parent.is_dir():
        raise click.UsageError(f"there is no folder {out.parent} to write {out.name} into")
    if resume and not out.with_suffix(".json").is_file():
        raise click.UsageError(
            f"--resume goes on from {out.with_suffix('.json')}, and there is no such file"
        )


def _check_page(path: Path, *, is_needed: bool) -> bool:
    """Whether a page can be made; refuses a place where something else is."""
    from precast._internal import atomic_write
    from precast.diagnostics.report.page import needed
    from precast.errors import MissingExtraError

    if atomic_write.is_not_ours(path):
        raise click.UsageError(
            f"cannot write {path}: {atomic_write.NOT_OURS}; name another with --html"
        )
    if not path.parent.is_dir():
        raise click.UsageError(f"there is no folder {path.parent} to write {path.name} into")
    try:
        needed()
    except MissingExtraError as error:
        if is_needed:
            raise
        click.echo(f"There will be no page: {error}", err=True)
        return False
    return True


def _knows_more(evidence: Path) -> bool:
    """Whether something was proven in an earlier search, whose evidence this is."""
    from precast.tuning.evidence import read

    return bool(read(evidence).proofs)


@contextmanager
def _processes() -> Iterator[int | None]:
    """Under torchrun, begins the group of all processes and gives this one's rank; else there is none."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield None
        return
    import torch.distributed as dist

    if dist.is_initialized():
        yield dist.get_rank()
        return
    dist.init_process_group()
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


@contextmanager
def _shown() -> Iterator[Callable[[Progress], None]]:
    """Shows on stderr what a search does and has found: as a bar, or as a line for each part where no terminal is."""
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        stages: set[str] = set()

        def line(now: Progress) -> None:
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
    with Bar(*columns, console=console, transient=True) as bar:
        running = bar.add_task("", total=None)

        def show(now: Progress) -> None:
            said = f"{_WORDS[now.stage]}: {now.said}"
            wide = max(20, console.width - 62)
            said = said if len(said) <= wide else said[: wide - 1] + "…"
            bar.update(
                running,
                description=f"{said}  [bold]best: {now.best}[/bold]",
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


def _print(found: TuningResult, written: dict[str, Path], as_json: bool) -> None:
    paths = {what: str(path) for what, path in written.items()}
    if as_json:
        click.echo(json.dumps({**found.as_dict(), **paths}, indent=2))
        return
    click.echo(found)
    click.echo()
    for what, path in paths.items():
        click.echo(f"{what:<8} {path}")
