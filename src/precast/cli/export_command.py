"""The command `precast export`, which writes a model with a policy's casts, and reports on the written files.

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
    help="Function that returns the model, or a pair of the model and its example.",
)
@click.option(
    "--example",
    metavar="MODULE:NAME",
    help="Example input of the model, or a function that returns one.",
)
@policy_option("default")
@dtype_option
@file_option("--out", text="Output file.")
@click.option(
    "--to",
    "file_format",
    type=click.Choice(_FORMATS),
    help="torch.export program, package compiled by AOTInductor, or ONNX.  [default: by --out]",
)
@click.option(
    "--strict", is_flag=True, help="Trace the model with Dynamo, as torch.export(strict=True) does."
)
@click.option(
    "--check/--no-check",
    default=True,
    help="Compare the results of the model, the program and the written file on the example.",
)
@json_option
def export(
    *,
    model: str | None,
    example: str | None,
    policy: str,
    dtype: str | None,
    out: Path | None,
    file_format: str | None,
    strict: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Write a model with a policy's casts built in. The file runs without precast.

    The results of the written file on the example are compared with the model's. For an ONNX file
    this needs onnxruntime.

    The model is put into evaluation mode. MODULE:FACTORY may return a pair of the model and its
    example. Otherwise --example names the model's argument, a tuple of its arguments, a dict of
    its keyword arguments, or a function that returns one of these.
    """
    if model is None or out is None:
        raise click.UsageError("--model and --out are required.")
    from precast import _torch  # noqa: F401 -- first: it refuses a PyTorch that is too old

    file_format = file_format or ("onnx" if out.suffix == ".onnx" else "program")
    from rich.console import Console

    from precast.diagnostics.explain.model import arguments
    from precast.policy.policy import as_policy
    from precast.shipping import exported_file, exported_reading
    from precast.shipping.exported import export as export_

    exported_file.check_replaceable(out)
    resolved = as_policy(policy)
    network, inputs = _model_and_example(model, example)
    args, kwargs = arguments(inputs)
    start = time.perf_counter()
    console = Console(file=sys.stderr)  # `sys.stderr` is replaced while PyTorch exports
    with console.status("exporting") as status:
        settings: dict[str, Any] = {
            "policy": resolved,
            "dtype": dtype,
            "strict": strict,
            "check": check,
        }
        program = export_(network.eval(), args, kwargs, **settings)
        status.update(f"writing {out}")
        if file_format == "onnx":
            from precast.shipping.exported_onnx import write_onnx

            write_onnx(program, out)
        elif file_format == "aoti":
            exported_file.write_package(program, out)
        else:
            exported_file.write(program, out, resolved)
        check_result = exported_file.FileCheck(None, "--no-check was given")
        if check:
            status.update(f"running {out}")
            check_result = exported_file.check_file(program, out, file_format, args, kwargs)
    sizes = exported_reading.contents(program).weight_bytes
    result = {
        "path": str(out),
        "to": file_format,
        "policy": resolved.name,
        **check_result.to_dict(),
        "bytes": out.stat().st_size,
        "weight_bytes": sizes,
        "seconds": round(time.perf_counter() - start, 2),
    }
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    weights = ", ".join(f"{size:,} bytes {name}" for name, size in sizes.items()) or "none"
    click.echo(f"{out}: {file_format}, policy {resolved.name}, weights {weights}")
    click.echo(f"{check_result}.")


def explain_difference(first: Path, second: Path, as_json: bool) -> None:
    """Print the operations and weights whose dtypes differ in two exported programs, and exit with the answer."""
    from precast.shipping import exported_file, exported_reading

    first_contents, second_contents = (
        exported_reading.contents(exported_file.read(path)) for path in (first, second)
    )
    differences = exported_reading.differences_between(first_contents, second_contents)
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
        f"{model} returns a model without an example: return both, or pass --example"
    )


def explain_file(path: Path, as_json: bool) -> None:
    """Print the operations and weights of the program in a file, with their dtypes."""
    from precast.shipping import exported_file, exported_reading

    program = exported_file.read(path)
    contents = exported_reading.contents(program, exported_file.policy_facts(path))
    click.echo(json.dumps(contents.to_dict(), indent=2) if as_json else str(contents))
