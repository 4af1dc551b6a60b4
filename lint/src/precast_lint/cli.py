"""The command `precast-lint check`; precast has it too, by an entry point.

Invariants: torch is never imported, and LibCST only if a file has to be parsed; findings go to stdout, notes,
progress and the summary of fixes to stderr where stdout is for a program.
Exit codes: 0 clean or all fixed, 1 findings are left or `--diff` shows something, 2 asked for wrongly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from precast_lint.version import __version__

if TYPE_CHECKING:
    from precast_lint.running.report import FileReport
    from precast_lint.selecting.settings import LintSettings

__all__ = ["check", "main"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_FORMATS = ("full", "concise", "json", "github")


def _codes(*names: str, help: str) -> Callable[[_Command], _Command]:
    return click.option(*names, multiple=True, metavar="CODES", help=help)


def _with_options(command: _Command) -> _Command:
    for option in reversed(
        [
            click.argument("paths", nargs=-1, type=click.Path(path_type=Path, allow_dash=True)),
            click.option(
                "--unsafe-fixes", is_flag=True, help="Apply also fixes that may change results."
            ),
            click.option(
                "--diff", "as_diff", is_flag=True, help="Print the fixes as a diff; change no file."
            ),
            _codes("--select", help="Use only these rules: a code, its beginning, a name, or ALL."),
            _codes("--extend-select", help="Use these rules too."),
            _codes("--ignore", help="Do not use these rules."),
            click.option(
                "--exclude",
                multiple=True,
                metavar="PATTERN",
                help="Do not check files and folders that match.",
            ),
            click.option(
                "--force-exclude", is_flag=True, help="Exclude also paths that are named here."
            ),
            click.option("--isolated", is_flag=True, help="Do not read pyproject.toml."),
            click.option(
                "--min-torch", metavar="V", help="The oldest PyTorch that the code must run on."
            ),
            click.option(
                "--output-format", type=click.Choice(_FORMATS), default="full", show_default=True
            ),
            click.option(
                "--exit-zero", is_flag=True, help="Exit with 0 even if there are findings."
            ),
            click.option(
                "--exit-non-zero-on-fix", is_flag=True, help="Exit with 1 if anything was fixed."
            ),
            click.option("--statistics", is_flag=True, help="Print how often each rule was found."),
            click.option("--quiet", "-q", is_flag=True, help="Print no summary."),
            click.option(
                "--output-file",
                "-o",
                type=click.Path(path_type=Path, dir_okay=False),
                help="Write the findings here.  [default: stdout]",
            ),
            click.option(
                "--stdin-filename", metavar="F", help="File name for code from stdin (-)."
            ),
            click.option(
                "--jobs",
                type=click.IntRange(min=1),
                help="How many processes.  [default: one per core]",
            ),
        ]
    ):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="precast-lint")
def main() -> None:
    """Find and fix mixed-precision code that is deprecated, wrong or slow."""


@main.command(short_help="Find and fix deprecated and wrong mixed-precision code.")
@click.option("--fix", "apply", is_flag=True, help="Apply fixes that cannot change results.")
@click.option("--explain", metavar="CODE", help="Explain a rule, or list the rules: ALL.")
@_with_options
def check(apply: bool, explain: str | None, **request: Any) -> None:
    """Find mixed-precision code that is deprecated or wrong, in files and folders (- for stdin).

    The code is read, not run. `precast-lint check --explain CODE` explains a finding. Settings are
    read from [tool.precast.check] in pyproject.toml.
    """
    if explain is not None:
        _explain(explain)
    else:
        _main(apply, **request)


def _explain(code: str) -> None:
    from precast_lint.selecting.registry import index, load

    if code == "ALL":
        for entry in index().values():
            click.echo(f"{entry.code}  {entry.severity:<11}  {entry.name}")
        return
    rule = load(code)
    if rule is None:
        raise click.UsageError(
            f"--explain: there is no rule {code!r}. `precast-lint check --explain ALL` lists all."
        )
    from precast_lint.output import pages

    click.echo(pages.page(rule), nl=False)


def _main(
    apply: bool,
    *,
    paths: tuple[Path, ...],
    as_diff: bool,
    output_format: str,
    exit_zero: bool,
    exit_non_zero_on_fix: bool,
    statistics: bool,
    quiet: bool,
    output_file: Path | None,
    force_exclude: bool,
    isolated: bool,
    stdin_filename: str | None,
    jobs: int | None,
    **request: Any,
) -> None:
    from precast_lint.running.runner import RunMode

    paths = paths or (Path(),)
    is_stdin = str(paths[0]) == "-"
    if is_stdin and len(paths) > 1:
        raise click.UsageError("stdin (-) can't be checked together with files.")
    start = Path(stdin_filename or ".") if is_stdin else paths[0]
    settings = _settings(None if isolated else start, request)
    if force_exclude:
        paths = tuple(path for path in paths if is_stdin or not settings.excludes(path))
    mode = RunMode(fix=apply or as_diff, write=apply and not as_diff and not is_stdin)
    if is_stdin:
        reports = _from_stdin(stdin_filename or "stdin.py", settings, mode, apply and not as_diff)
    else:
        reports = _from_files(paths, settings, mode, jobs)
    _note(reports)
    if as_diff:
        _print_diff(reports)
    else:
        _print(
            reports,
            output_format,
            statistics=statistics,
            quiet=quiet,
            path=output_file,
            err=is_stdin and apply,
        )
    if exit_non_zero_on_fix and any(report.fixed for report in reports):
        sys.exit(1)
    sys.exit(_exit_code(reports, as_diff, exit_zero))


def _settings(start: Path | None, requests: dict[str, Any]) -> LintSettings:
    from precast_lint.selecting.settings import load

    for name in ("select", "extend_select", "ignore"):
        requests[name] = [
            code for value in requests[name] for code in value.split(",") if code.strip()
        ]
    requests["unsafe_fixes"] = requests["unsafe_fixes"] or None
    try:
        return load(start.parent if start and not start.is_dir() else start, requests)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _from_files(
    paths: Sequence[Path], settings: LintSettings, mode: Any, jobs: int | None
) -> list[FileReport]:
    from precast_lint.running.files import find
    from precast_lint.running.runner import run

    missing = [path for path in paths if not path.exists() and not path.is_symlink()]
    if missing:
        raise click.UsageError(f"There is no file or folder {str(missing[0])!r}.")
    with _progress() as advance:
        return run(find(paths, settings), settings, mode, advance=advance, jobs=jobs)


def _from_stdin(filename: str, settings: LintSettings, mode: Any, echo: bool) -> list[FileReport]:
    from precast_lint.running.runner import run_text

    data = sys.stdin.buffer.read()
    report = run_text(filename, data, settings, mode)
    if echo:
        sys.stdout.buffer.write(data if report.after is None else report.after)
        sys.stdout.buffer.flush()
    return [report]


def _note(reports: Sequence[FileReport]) -> None:
    for report in reports:
        if report.note is not None:
            kind = "error" if report.failed else "note"
            click.echo(f"{kind}: skipped {report.filename}: {report.note}", err=True)


def _print_diff(reports: Sequence[FileReport]) -> None:
    from precast_lint.output.formats import diff

    for report in reports:
        if report.after is not None:
            click.echo(diff(report), nl=False)
    fixes = [finding.fix for report in reports for finding in report.findings if finding.fix]
    unsafe = sum(fix["applicability"] == "unsafe" for fix in fixes)
    if unsafe:
        click.echo(
            f"{unsafe} more with `--unsafe-fixes`, which may change what the program does.",
            err=True,
        )


def _print(
    reports: Sequence[FileReport],
    output_format: str,
    *,
    statistics: bool,
    quiet: bool,
    path: Path | None,
    err: bool,
) -> None:
    from precast_lint.output import formats

    findings = [finding for report in reports for finding in report.findings]
    text = formats.statistics(reports) if statistics else formats.FORMATS[output_format](findings)
    if path is not None:
        _write(path, os.fsencode(f"{text}\n" if text else ""))
    else:
        click.echo(text, err=err, nl=bool(text))
    if output_format in ("full", "concise") and not quiet:
        click.echo(formats.summary(reports), err=err)


def _write(path: Path, content: bytes) -> None:
    from precast_lint.running import whole_file

    try:
        whole_file.write(path, content)
    except OSError as error:
        raise click.ClickException(
            f"cannot write {path}: {error.strerror or error}; what was there before is unchanged. "
            "Free some space, or name a file in a folder that you may write to"
        ) from error


def _exit_code(reports: Sequence[FileReport], as_diff: bool, exit_zero: bool) -> int:
    if any(report.failed for report in reports):
        return 2
    if exit_zero:
        return 0
    if as_diff:
        return int(any(report.after is not None for report in reports))
    return int(any(report.findings for report in reports))


@contextmanager
def _progress() -> Iterator[Callable[[int, int], object]]:
    """Show a progress bar on stderr if it is a terminal; yield a function that takes the files done and their total.

    No bar is shown without rich: precast-lint requires click and LibCST only.
    """
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield max  # any function of two numbers
        return
    from rich.console import Console
    from rich.progress import Progress

    # The bar has no thread: the process forks while the bar is shown.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        task = progress.add_task("checking", total=None)

        def advance(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, refresh=True)

        yield advance
