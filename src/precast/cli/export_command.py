"""The command `precast export`, which writes a model with a policy built in, and displays of such files.

Invariants: the file is written completely or not at all; progress goes to stderr, and only the result to stdout.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import click

from precast.cli.exit_codes import ExitCode
from precast.cli.options import dtype_option, file_option, json_option, policy_option

__all__ = ["explain_difference", "explain_file", "export"]

_FORMATS: Final = ("program", "aoti", "onnx")


@click.command(short_help="Write a model with a policy's casts built in.")
@click.option(
    "--model",
    metavar="MODULE:FACTORY",
    help="The function that makes the model, or gives a model and an example.",
)
@click.option(
    "--example", metavar="MODULE:NAME", help="An input of the model, or a function that gives one."
)
@policy_option("default")
@dtype_option
@file_option("--out", text="The file to write.")
@click.option(
    "--to",
    "form",
    type=click.Choice(_FORMATS),
    help="A program of torch.export, a package that AOTInductor has compiled, or ONNX.  [default: by --out]",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Have Dynamo read the model's code, as torch.export(strict=True).",
)
@click.option(
    "--check/--no-check",
    default=True,
    help="Run the model, the program and the written file on the example, and compare their results.",
)
@json_option
def export(
    *,
    model: str | None,
    example: str | None,
    policy: str,
    dtype: str | None,
    out: Path | None,
    form: str | None,
    strict: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Write a model whose precision is a policy's, to be run where precast is not installed.

    The written file is run on the example, an ONNX file by onnxruntime where that is installed, and
    its results are compared with the model's.

    The model is put into evaluation mode. The factory may return a pair of the model and its
    example; otherwise --example names one: the model's argument, a tuple of its arguments, a dict
    of its keyword arguments, or a function that returns one of these.
    """
    if model is None or out is None:
        raise click.UsageError("Name a --model and the file to write, --out.")
    from precast import _torch  # noqa: F401 -- first, as it refuses a PyTorch that is too old

    form = form or ("onnx" if out.suffix == ".onnx" else "program")
    from rich.console import Console

    from precast.diagnostics.explain.model import arguments
    from precast.policy.policy import as_policy
    from precast.shipping import exported_file, exported_reading
    from precast.shipping.exported import export as export_

    exported_file.check_replaceable(out)
    chosen = as_policy(policy)
    network, inputs = _model_and_example(model, example)
    args, kwargs = arguments(inputs)
    began = time.perf_counter()
    console = Console(file=sys.stderr)  # `sys.stderr` is replaced while PyTorch exports
    with console.status("exporting") as status:
        settings: dict[str, Any] = {
            "policy": chosen,
            "dtype": dtype,
            "strict": strict,
            "check": check,
        }
        program = export_(network.eval(), args, kwargs, **settings)
        status.update(f"writing {out}")
        if form == "onnx":
            from precast.shipping.exported_onnx import write_onnx

            write_onnx(program, out)
        elif form == "aoti":
            exported_file.write_package(program, out)
        else:
            exported_file.write(program, out, chosen)
        checked = exported_file.FileCheck(None, "--no-check was given")
        if check:
            status.update(f"running {out}")
            checked = exported_file.check_file(program, out, form, args, kwargs)
    sizes = exported_reading.contents(program).weight_bytes
    result = {
        "path": str(out),
        "to": form,
        "policy": chosen.name,
        **checked.to_dict(),
        "bytes": out.stat().st_size,
        "weight_bytes": sizes,
        "seconds": round(time.perf_counter() - began, 2),
    }
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    stored = ", ".join(f"{size:,} bytes {name}" for name, size in sizes.items()) or "none"
    click.echo(f"{out}: {form}, policy {chosen.name}, weights {stored}")
    click.echo(f"{checked}.")


def explain_difference(first: Path, second: Path, as_json: bool) -> None:
    """Print the operations and weights of two exported programs that have other dtypes, and exit with the answer."""
    from precast.shipping import exported_file, exported_reading

    one, other = (exported_reading.contents(exported_file.read(path)) for path in (first, second))
    differences = exported_reading.differences_between(one, other)
    if as_json:
        rows = [vars(each) for each in differences]
        click.echo(json.dumps({"equal": not rows, "differences": rows}, indent=2))
    elif differences:
        click.echo("\n".join([f"{first.name} -> {second.name}", *map(str, differences)]))
    else:
        click.echo("the same operations and weights in the same dtypes")
    sys.exit(ExitCode.NO if differences else ExitCode.YES)


def _model_and_example(model: str, example: str | None) -> tuple[Any, Any]:
    from precast.cli.python_objects import load_example, load_object

    try:
        network = load_object(model)
        if example is not None:
            return network, load_example(example)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if isinstance(network, tuple) and len(network) == 2:
        return network
    raise click.UsageError(
        f"{model} returns a model without an example: return both, or name an example with --example"
    )


def explain_file(path: Path, as_json: bool) -> None:
    """Print the operations and weights of the program in a file, with their dtypes."""
    from precast.shipping import exported_file, exported_reading

    program = exported_file.read(path)
    contents = exported_reading.contents(program, exported_file.policy_facts(path))
    click.echo(json.dumps(contents.to_dict(), indent=2) if as_json else str(contents))
