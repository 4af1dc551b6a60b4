"""The command `precast run`.

Invariants: torch is imported when the program that is run imports it, and never for `--merge`. The exit code is the
program's; where nothing was run it is 2 if the command was used wrongly, and 1 if an extra is missing.
"""

from __future__ import annotations

from pathlib import Path

import click

from precast.cli.options import file_option, policy_option, script_arguments
from precast.errors import MissingExtraError, PolicyError

__all__ = ["check_policy", "run"]

_DEFAULT = Path("precast-report.html")
_DTYPES = ("float32", "fp32", "float16", "fp16", "half", "bfloat16", "bf16")


def _steps(text: str) -> tuple[int, int]:
    """Parse the value A:B of an option, with A < B."""
    begin, _, end = text.partition(":")
    if not (begin.isdecimal() and end.isdecimal() and int(begin) < int(end)):
        raise click.BadParameter(f"expected A:B with A < B, as in 2:5, got {text!r}")
    return int(begin), int(end)


@click.command(
    short_help="Run a training script unchanged and write a mixed-precision report.",
    context_settings={"allow_interspersed_args": False},
)
@script_arguments
@policy_option("torch")
@file_option("--report", "page", text=f"Output file of the report.  [default: {_DEFAULT}]")
@file_option("--json", "as_json", text="Also write the report's data as JSON.")
@click.option(
    "--steps",
    type=_steps,
    metavar="A:B",
    default="2:5",
    show_default=True,
    help="Trace steps A to B-1 in detail (zero-based).",
)
@file_option(
    "--record",
    text="Also record the run for `precast compare`, each step of it unless --steps is given.",
)
@click.option(
    "--level",
    type=click.Choice(("operations", "modules")),
    default="operations",
    show_default=True,
    help="Record each operation, or results and gradients of modules only.",
)
@click.option(
    "--every", type=click.IntRange(min=1), default=1, help="Record every N-th step.  [default: 1]"
)
@click.option(
    "--modules", metavar="PATTERN", default="", help="Record these modules only, as in 'layers.3*'."
)
@click.option(
    "--logits", metavar="MODULE", help="Record probabilities of tokens from this module's result."
)
@click.option(
    "--split",
    type=click.IntRange(min=1),
    default=1,
    help="Also record each of N parts of a batch, to compare with a run of the parts.",
)
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser at the end.")
@click.option("--health", is_flag=True, help="Also watch for overflow and underflow.")
@click.option(
    "--merge",
    "merges",
    is_flag=True,
    help="Run nothing: write the report of the files that --json wrote, one for each rank.",
)
def run(
    program: str | None,
    arguments: tuple[str, ...],
    *,
    is_module: bool,
    policy: str,
    page: Path | None,
    as_json: Path | None,
    steps: tuple[int, int],
    record: Path | None,
    level: str,
    every: int,
    modules: str,
    logits: str | None,
    split: int,
    opens: bool,
    health: bool,
    merges: bool,
) -> None:
    """Run a training or inference script unchanged and write a report on its precision.

    The script's autocast regions follow the policy. With the policy `torch`, the default, results
    are those of `python SCRIPT`. Everything after SCRIPT is passed to the script. The exit code is
    that of the script; at its end, precast prints a summary to stderr.

    With --merge the arguments are the files that --json wrote in the processes of one run, on this
    machine or another: precast run --merge --report all.html rank0.json rank1.json
    """
    if merges:
        if is_module or opens or health or record:
            raise click.UsageError("--merge takes files, and no option but --report and --json.")
        _merge([Path(name) for name in (program, *arguments) if name], page or _DEFAULT, as_json)
        return
    if program is None:
        raise click.UsageError("expected a script, as in `precast run train.py`")
    from precast import report
    from precast._internal.atomic_write import foreign_file_error
    from precast.running.output_files import OutputFiles, rank_from_environment
    from precast.running.session import RunRecording, Session
    from precast.running.target import Target

    check_policy(policy)
    try:
        report.needed()
        page = page or _DEFAULT
    except MissingExtraError:
        if page or opens or not as_json:
            raise  # else the data, which were asked for, are made without it
    files = OutputFiles(
        page and page.absolute(), as_json and as_json.absolute(), rank_from_environment()
    )
    target = Target(program, is_module, arguments)
    try:
        target.check()
        files.check()
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    recorded = None
    if record is not None:
        source = click.get_current_context().get_parameter_source("steps")
        is_default = source is click.core.ParameterSource.DEFAULT
        if problem := foreign_file_error(record.absolute(), "--record"):
            raise click.UsageError(problem)
        options = {"level": level, "every": every, "modules": modules, "logits": logits}
        options |= {"steps": None if is_default else steps, "split": split}
        recorded = RunRecording(record.absolute(), options)
    Session(target, files, policy, steps, health, opens, recorded).run()


def check_policy(policy: str) -> None:
    """Refuse an unknown policy before anything runs. The content of a file is checked once PyTorch is loaded."""
    from precast.policy import preset_files
    from precast.policy.values import nearest

    try:
        if preset_files.find(policy) is not None or Path(policy).exists():
            return
    except PolicyError as error:
        raise click.UsageError(f"{error}. Nothing was run") from error
    presets = preset_files.names()
    if policy.removeprefix("torch.") in _DTYPES:
        hint = "; that is a dtype, which the program's regions choose, as in torch.autocast(device, dtype=...)."
    else:
        hint = nearest(policy, [*presets, *map(str, Path(policy).parent.glob("*.toml"))])
    raise click.UsageError(
        f"no policy {policy!r}: neither a preset nor a file{hint} Allowed: {', '.join(presets)}, or the "
        "path of a TOML file. Nothing was run"
    )


def _merge(documents: list[Path], page: Path, as_json: Path | None) -> None:
    """Write the report of the processes of one run, and print its path."""
    if not documents:
        raise click.UsageError("--merge: name the files that `precast run --json` wrote.")
    misplaced = next((path for path in documents if str(path).startswith("-")), None)
    if misplaced is not None:
        raise click.UsageError(f"--merge: write {misplaced} before the files.")
    from precast import report

    merged = report.merge([report.load(path) for path in documents])
    if as_json is not None:
        report.save(merged, as_json)
    report.write(merged, page)
    click.echo(str(page))
