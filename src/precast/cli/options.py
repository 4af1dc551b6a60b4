"""Options that several commands have: one meaning and one help text each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from precast.policy.values import canonical_dtype

__all__ = [
    "device_option",
    "dtype_option",
    "file_option",
    "json_option",
    "policy_option",
    "script_arguments",
    "seed_option",
]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_LARGEST_SEED: Final = 2**63 - 1


def file_option(*names: str, text: str) -> Callable[[_Command], _Command]:
    """Return an option that names a file."""
    return click.option(*names, type=click.Path(path_type=Path), metavar="FILE", help=text)


def json_option(command: _Command) -> _Command:
    """Add `--json`, which prints one JSON object on stdout and nothing else."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def script_arguments(command: _Command) -> _Command:
    """Add a script with its arguments, and `-m`; the command has to stop its own options at the script."""
    module = "SCRIPT is the name of a module, as in python -m."
    command = click.option("-m", "is_module", is_flag=True, help=module)(command)
    command = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)(command)
    return click.argument("program", metavar="SCRIPT", required=False)(command)


def policy_option(default: str) -> Callable[[_Command], _Command]:
    """Return the option `--policy`."""
    return click.option(
        "--policy",
        default=default,
        show_default=True,
        help="A preset, as torch or torch@2.11, or a policy file.",
    )


def dtype_option(command: _Command) -> _Command:
    """Add `--dtype`, the 16-bit dtype of a region."""
    return click.option(
        "--dtype", callback=_dtype, help="bfloat16 or float16.  [default: PyTorch's for the device]"
    )(command)


def _dtype(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    name = canonical_dtype(value)
    if value is not None and name not in ("bfloat16", "float16"):
        raise click.BadParameter(f"{value!r} is no 16-bit dtype. Write bfloat16 or float16.")
    return name


def device_option(default: str) -> Callable[[_Command], _Command]:
    """Return the option `--device`; `default` describes the devices without it."""
    return click.option("--device", help=f"cpu, cuda or cuda:1.  [default: {default}]")


def seed_option(command: _Command) -> _Command:
    """Add `--seed`, the seed of all random numbers of a command."""
    return click.option(
        "--seed",
        type=click.IntRange(0, _LARGEST_SEED),
        default=0,
        show_default=True,
        help="Random seed.",
    )(command)
