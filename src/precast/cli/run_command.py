"""The commands `precast run` and `precast report`.

Invariants: torch is imported when the program that is run imports it, and never for `report`. The exit code of `run` is
the program's; where nothing was run it is 2 if the command was used wrongly, and 1 if an extra is missing.
"""

from __future__ import annotations

from pathlib import Path

import click

from precast.errors import MissingExtraError, PolicyError

__all__ = ["report_", "run"]

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
@click.argument("program", metavar="SCRIPT", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as in python -m."
)
@click.option(
    "--policy",
    default="torch",
    show_default=True,
    help="A preset, as torch or torch@2.11, or a policy file.",
)
@click.option(
    "--report",
    "page",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"Output file of the report.  [default: {_DEFAULT}]",
)
@click.option(
    "--json",
    "as_json",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write the report's data as JSON.",
)
@click.option(
    "--steps",
    type=_steps,
    metavar="A:B",
    default="2:5",
    show_default=True,
    help="Trace steps A to B-1 in detail (zero-based).",
)
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser at the end.")
@click.option("--health", is_flag=True, help="Also watch for overflow and underflow.")
def run(
    program: str | None,
    arguments: tuple[str, ...],
    *,
    is_module: bool,
    policy: str,
    page: Path | None,
    as_json: Path | None,
    steps: tuple[int, int],
    opens: bool,
    health: bool,
) -> None:
    """Run a training or inference script unchanged and write a report on its precision.

    The script's autocast regions follow the policy. With the policy `torch`, the default, results
    are those of `python SCRIPT`. Everything after SCRIPT is passed to the script. The exit code is
    that of the script; at its end, precast prints a summary to stderr.
    """
    if program is None:
        raise click.UsageError("expected a script, as in `precast run train.py`")
    from precast import report
    from precast.running.output_files import OutputFiles, rank_from_environment
    from precast.running.session import Session
    from precast.running.target import Target

    _check_policy(policy)
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
    Session(target, files, policy, steps, health, opens).run()


def _check_policy(policy: str) -> None:
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


@click.command("report", short_help="Make the report of a run from its data.")
@click.argument(
    "documents",
    metavar="FILE...",
    nargs=-1,
    type=click.Path(dir_okay=False, path_type=Path),
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=_DEFAULT,
    show_default=True,
    help="Output file.",
)
@click.option(
    "--json",
    "as_json",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write the merged data as JSON.",
)
def report_(documents: tuple[Path, ...], output: Path, as_json: Path | None) -> None:
    """Make the report of a run from the files of `precast run --json`, one for each rank."""
    if not documents:
        raise click.UsageError("Name the files that `precast run --json` wrote, one for each rank.")
    from precast import report

    merged = report.merge([report.load(path) for path in documents])
    if as_json is not None:
        report.save(merged, as_json)
    report.write(merged, output)
    click.echo(str(output))
