"""The command `precast compare`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from precast.cli.exit_codes import ExitCode
from precast.cli.options import file_option, json_option
from precast.errors import ComparisonError

__all__ = ["compare"]


@click.command(short_help="Find the first difference of two recorded runs, and its cause.")
@click.argument("a", type=click.Path(path_type=Path), required=False)
@click.argument("b", type=click.Path(path_type=Path), required=False)
@click.option(
    "--bound",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Relative distance of results, losses and weights that is allowed.",
)
@file_option("--report", "page", text="Also write the result as a page, FILE.html.")
@click.option(
    "--model",
    metavar="MODULE:FACTORY",
    help="The function that makes the model: search for the policy that cures the difference.",
)
@click.option(
    "--data",
    metavar="MODULE:NAME",
    help="For --model: an input of the model, or a function that returns one.",
)
@json_option
def compare(
    a: Path | None,
    b: Path | None,
    *,
    bound: float,
    page: Path | None,
    model: str | None,
    data: str | None,
    as_json: bool,
) -> None:
    """Find the first difference of two runs, and its cause.

    A and B are files of `precast run --record` or of precast.record(...). The exit code is 0 if the
    runs are equal within the bound, 1 if they are not, and 2 if they could not be compared.
    """
    if a is None or b is None:
        raise click.UsageError("expected two files, as in `precast compare a.run b.run`")
    if (model is None) != (data is None):
        raise click.UsageError("--model and --data go together.")
    from rich.console import Console

    from precast.comparison.comparing import compare as compare_files

    try:
        difference = compare_files(a, b, bound=bound)
        if model is not None and data is not None:
            from precast.cli.python_objects import load_example, load_model
            from precast.tuning.setting_comparison import cure

            difference = cure(load_model(model), load_example(data), difference)
    except (ComparisonError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if page is not None:
        difference.save(page.with_suffix(".html"))
    if as_json:
        click.echo(json.dumps(difference.to_dict(), indent=2))
    else:
        Console().print(difference.render())
    sys.exit(ExitCode.YES if difference.within_bound else ExitCode.NO)
