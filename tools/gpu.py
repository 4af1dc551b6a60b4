"""Everything that needs a GPU, in one call: tests, demos, whole networks eager and compiled.

    python -m tools.gpu                      about nine minutes; writes docs/gpu.md and docs/data/gpu.json
    python -m tools.gpu --out FOLDER         writes there, with the output of each part beside it
    python -m tools.gpu --minutes 25         more rounds and networks

Invariants:
    - A part that fails, or runs out of time, ends itself alone; the page says so.
    - The longest part is last, and has the time that is left; it is interrupted, and keeps the rows it has.
    - The exit code is 0 only if every part did what it should; 2 where there is no GPU.
    - Not part of the package. Needs what `pip install -e '.[dev]'` installs, and a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.float8 import said
from tools.versions import read_report

__all__ = ["Part", "main", "parts", "run", "table"]

ROOT = Path(__file__).parent.parent
_GRACE = 30  # seconds that an interrupted part has to write its rows
_FILES = "{files}"
"""In a part's arguments: the files with tests marked gpu. Others may need packages that a GPU machine lacks."""
_HEAD = """# On a GPU

What ran on a GPU, and how it went; `python -m tools.gpu` runs all of it and writes this page.

"""


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        name: what it shows.
        arguments: of Python; `{out}` is the folder for files, and a last `{files}` the files with tests marked gpu.
        share: of the time that is left, the most that it takes.
        read: from its output file and exit code to one line on how it went.
    """

    name: str
    arguments: tuple[str, ...]
    share: float
    read: Callable[[Path], str] = field(default=lambda _: "done", compare=False)


@dataclass(frozen=True)
class Done:
    """What became of a part."""

    name: str
    command: str
    code: int
    seconds: int
    result: str


def parts() -> tuple[Part, ...]:
    """All parts, in the order in which they run."""
    junit, models, demos = "{out}/tests.xml", "{out}/models.json", "{out}/demo"
    products = "{out}/float8.json"
    pytest = ("-m", "pytest", "-m", "gpu", "--quiet", "--junit-xml", junit, _FILES)
    precast = ("-m", "precast")
    return (
        Part("doctor", (*precast, "doctor", "--json"), 0.1, _doctor),
        Part("tests marked gpu", pytest, 0.3, _tests),
        Part("demo checkerboard", (*precast, "demo", "checkerboard", "--device", "cuda", "--out", demos), 0.2),
        Part("demo digits", (*precast, "demo", "digits", "--device", "cuda", "--out", demos), 0.3),
        Part("float8 products", ("-m", "benchmarks.float8", "--json", products), 0.4, _float8),
        Part("whole networks", ("-m", "benchmarks", "models", "--device", "cuda", "--json", models), 1.0, _models),
    )  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run all parts, write the page; 0 if all did what they should."""
    chosen = _parser().parse_args(arguments)
    machine = _machine()
    if machine is None:
        print(
            "no CUDA device that PyTorch sees: this script is for a machine that has one",
            file=sys.stderr,
        )
        return 2
    out = chosen.out or ROOT / "docs" / "data"
    out.mkdir(parents=True, exist_ok=True)
    done = []
    for one in run(parts(), out, chosen.minutes * 60):
        print(f"{one.name}: {one.result} ({one.seconds} s)", file=sys.stderr)
        done.append(one)
    found = {"machine": machine, "parts": [asdict(one) for one in done]}
    (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    page = (chosen.out or ROOT / "docs") / "gpu.md"
    page.write_text(_HEAD + table(found), encoding="utf-8")
    print(page)
    return int(any(one.code for one in done))


def run(these: Sequence[Part], out: Path, seconds: float) -> Iterator[Done]:
    """Runs one after the other within a time; their output is in `out`."""
    ends = time.monotonic() + seconds
    for part in these:
        limit = max((ends - time.monotonic()) * part.share, 1.0)
        command = [a.format(out=out) for a in part.arguments if a != _FILES]
        command += _files_of_tests() if _FILES in part.arguments else []
        begun = time.monotonic()
        log = out / f"gpu {part.name}.txt".replace(" ", "-")
        with log.open("w", encoding="utf-8") as file:
            code = _within(limit, [sys.executable, *command], file)
        took = round(time.monotonic() - begun)
        yield Done(
            part.name,
            " ".join(["python", *part.arguments]),
            code,
            took,
            _result(part, out, log, code),
        )


def table(found: dict[str, Any]) -> str:
    """The page's text after its head."""
    machine = found["machine"]
    lines = [
        f"{machine['gpu']}, PyTorch {machine['torch']}, Python {machine['python']}, on {machine['date']}.",
        "",
        "| part | command | seconds | result |",
        "|---|---|---|---|",
    ]
    for part in found["parts"]:
        lines.append(
            f"| {part['name']} | `{part['command']}` | {part['seconds']} | {part['result']} |"
        )
    return "\n".join(lines) + "\n"


def _within(limit: float, command: list[str], file: Any) -> int:
    """The exit code of a command that is interrupted, then killed, where it takes too long."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=file,
        stderr=subprocess.STDOUT,
        preexec_fn=_hear_interrupts,  # noqa: PLW1509 -- one system call, no lock
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return 124


def _hear_interrupts() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _result(part: Part, out: Path, log: Path, code: int) -> str:
    ended = {0: "", 124: "out of time; "}.get(code, f"exit code {code}; ")
    try:
        return ended + part.read(log if part.read is _doctor else out)
    except (
        OSError,
        SyntaxError,
        ValueError,
        KeyError,
    ) as error:  # XML that ends too early is a SyntaxError
        return f"{ended}no result: {type(error).__name__}"


def _doctor(log: Path) -> str:
    text = log.read_text(encoding="utf-8")
    json.loads(text[text.index("{") : text.rindex("}") + 1])
    return "what it measured is in its output"


def _tests(out: Path) -> str:
    passed, skipped, failures = read_report(out / "tests.xml")
    named = f": {', '.join(failures)}" if failures else ""
    return f"{passed} passed, {skipped} skipped, {len(failures)} failed{named}"


def _float8(out: Path) -> str:
    return said(json.loads((out / "float8.json").read_text(encoding="utf-8")))


def _models(out: Path) -> str:
    rows = json.loads((out / "models.json").read_text(encoding="utf-8"))["rows"]
    ratios = [row["ratio"] for row in rows if row["kind"] == "attached" and "ratio" in row]
    if not ratios:
        return f"{len(rows)} rows"
    return (
        f"{len(rows)} rows; attached takes {min(ratios):.2f} to {max(ratios):.2f} of torch.autocast"
    )


def _files_of_tests() -> list[str]:
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [path for path in tests if "mark.gpu" in path.read_text(encoding="utf-8")]
    return [str(path.relative_to(ROOT)) for path in marked]


def _machine() -> dict[str, str] | None:
    if not torch.cuda.is_available():
        return None
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for everything; docs/ if none is given")
    parser.add_argument("--minutes", type=float, default=9.0, help="the most that it takes")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
