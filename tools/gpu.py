"""Everything that needs a GPU, in one call, the most valuable first: tests and demos, then what is timed.

    python -m tools.gpu                      about nine minutes; writes docs/gpu.md and docs/data/gpu.json
    python -m tools.gpu --out FOLDER         writes there, with the output of each part in logs.tar.gz
    python -m tools.gpu --redo FILE          does what is missing in FILE, the gpu.jsonl of another run
    python -m tools.gpu --wheels FOLDER      installs the wheels of a folder for this run, on a machine without network
    python -m tools.gpu --only WORDS         the parts with one of these words in their name
    python -m tools.gpu --trial              all parts side by side: shows soon what fails, and times nothing

Invariants:
    - A row is written to gpu.jsonl as soon as it is known; the page is made of these rows, after an interrupt too.
    - A part that fails, or runs out of time, ends itself alone; the page says so.
    - Tests and demos run side by side; nothing runs beside what is timed.
    - The exit code is 0 only if every part did what it should; 2 where there is no GPU.
    - Not part of the package. Needs a CUDA device, pytest with xdist, and what precast itself needs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

__all__ = ["Part", "files_of_tests", "main", "page", "parts", "run"]

ROOT = Path(__file__).parent.parent
STATE = "gpu.jsonl"
_GRACE = 3  # seconds that an interrupted part has to write its rows
_MINUTES = 9.0
_FEWEST = 2.0
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        name: its name on the page; that of a section of `benchmarks.cuda` where it is one.
        arguments: of Python; `{out}` is the folder for files.
        seconds: the most that it takes, of nine minutes.
        timed: whether nothing may run beside it.
        result: from its output to one line on how it went.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: int
    timed: bool = True
    result: Callable[[str], str] = field(default=lambda _: "done", compare=False)


def parts(only_tests: Sequence[str] = ()) -> tuple[Part, ...]:
    """All parts, in the order in which they run; `only_tests` are in place of all tests for a GPU."""
    options = ("-m", "gpu", "--quiet", "-rfE", "--tb=short", "-p", "no:benchmark", "-n", "8")
    pytest = ("-m", "pytest", *options)
    tests = tuple(only_tests) or tuple(files_of_tests())
    return (
        Part("tests", (*pytest, *tests), 180, False, _last_line),
        Part(
            "demo", ("-m", "precast", "demo", "--device", "cuda", "--out", "{out}/demo"), 60, False
        ),
        _ahead("compiled", 120),
        _ahead("float8-compiled", 120),
        Part("doctor", ("-m", "precast", "doctor", "--json"), 40),
        _section("optimizer", 40),
        _section("scaler", 30),
        _section("observers", 40),
        _section("products", 30),
        _section("captured", 30),
        _section("eager", 160),
        _section("compiled", 60),
        _section("float8", 60),
        _section("float8-compiled", 80),
    )


def _section(name: str, seconds: int) -> Part:
    return Part(name, ("-m", "benchmarks.cuda", name, "--rows", "{out}/" + STATE), seconds)


def _ahead(name: str, seconds: int) -> Part:
    """Compiles what a section measures, beside the tests: its kernels are then on the disk."""
    command = ("-m", "benchmarks.cuda", name, "--rows", "{out}/logs/ahead.jsonl")
    return Part(f"ahead: {name}", command, seconds, False, lambda _: "not used")


def main(arguments: Sequence[str]) -> int:
    """Run all parts, write the page; 0 if all did what they should."""
    chosen = _parser().parse_args(arguments)
    begin = time.monotonic()
    machine = _machine()
    if machine is None:
        print(
            "no CUDA device that PyTorch sees: this script is for a machine that has one",
            file=sys.stderr,
        )
        return 2
    out = (chosen.out or ROOT / "build" / "gpu").resolve()
    out.mkdir(parents=True, exist_ok=True)
    state = out / STATE
    before = _read(chosen.redo) if chosen.redo else []
    left = _left(before)
    kept = _kept(before, left)
    state.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    words = chosen.only.split(",")
    these = [part for part in left if any(word in part.name for word in words)]
    with tempfile.TemporaryDirectory() as site:
        try:
            environment = _environment(chosen.wheels, Path(site))
            native = [sys.executable, "-m", "tools.native_library"]
            subprocess.run(native, cwd=ROOT, env=environment, check=False)
            if chosen.trial:
                these = [replace(part, timed=False, seconds=3600) for part in these]
            for row in run(these, out, chosen.minutes, environment, begin):
                print(f"{row['unit']}: {row['result']} ({row['seconds']} s)", flush=True)
        except KeyboardInterrupt:
            print("interrupted: the page has the rows until here", file=sys.stderr)
        finally:
            path = _write(machine, out, into_docs=chosen.out is None and not chosen.trial)
    print(path)
    rows = [row for row in _read(state) if row["section"] == "parts"]
    return int(len(rows) < len(these) or any(row["code"] for row in rows))


def run(
    these: Sequence[Part],
    out: Path,
    minutes: float,
    environment: Mapping[str, str] | None = None,
    begin: float | None = None,
) -> Iterator[dict[str, Any]]:
    """The row of each part, which is in the state too; neighbours that are not timed run side by side."""
    ends = (time.monotonic() if begin is None else begin) + minutes * 60
    running: set[subprocess.Popen[bytes]] = set()
    active: set[Part] = set()
    is_interrupted = threading.Event()

    def outcome(part: Part) -> dict[str, Any]:
        active.add(part)
        try:
            if is_interrupted.is_set():
                raise CancelledError
            left = ends - time.monotonic() - 5
            limit = min(max(part.seconds * minutes / _MINUTES, _FEWEST), left)
            return _outcome(part, out, limit, environment, running)
        finally:
            active.discard(part)

    for timed, group in itertools.groupby(these, lambda part: part.timed):
        at_once = list(group)
        with ThreadPoolExecutor(1 if timed else len(at_once)) as pool:
            try:
                futures = [pool.submit(outcome, part) for part in at_once]
                for row in (future.result() for future in futures):
                    with (out / STATE).open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                    yield row
            except BaseException:  # an interrupt: the pool would wait for all parts
                is_interrupted.set()
                while active:
                    for process in tuple(running):
                        with suppress(ProcessLookupError):  # it has ended
                            os.killpg(process.pid, signal.SIGKILL)
                    time.sleep(0.05)
                raise


def page(machine: Mapping[str, str], rows: Rows, notes: Sequence[str] = ()) -> str:
    """The text of docs/gpu.md; `notes` are what a person has to say about the rows."""
    results = [row for row in rows if row["section"] == "parts" and row["result"] != "done"]
    lines = [
        "# On a GPU",
        "",
        "The parts of `python -m tools.gpu` that have run on a GPU, and their results. A ratio is the median of ratios",
        "within a round, in which all variants take turns, with the interquartile range in brackets; below 1 is",
        "faster. [The data](data/gpu.json) include all times and peaks of memory.",
        "",
        f"{machine['gpu']}, PyTorch {machine['torch']}, Python {machine['python']}, on {machine['date']}.",
        "",
        *[line for note in notes for line in (textwrap.fill(note, 118), "")],
        *_table(
            ["part", "seconds", "result"],
            [[row["unit"], row["seconds"], row["result"]] for row in results],
        ),
    ]
    for section in dict.fromkeys([*_CASES, *_COLUMNS]):
        its = [row for row in rows if row["section"] == section]
        if not its:
            continue
        lines += ["", f"## {section}", ""]
        elsewhere = dict.fromkeys(row["gpu"] for row in its if "gpu" in row)
        lines += [line for gpu in elsewhere for line in (f"On an {gpu}.", "")]
        if section in _CASES:
            lines += _ratios(its, *_CASES[section])
        else:
            columns = _COLUMNS[section]
            lines += _table(list(columns), _cells(its, columns))
    return "\n".join(lines) + "\n"


_NETWORKS = (("case", "work", "dtype"), "torch.autocast")
_FLOAT8 = (("tokens", "inputs", "outputs"), "bfloat16")
_CASES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "eager": _NETWORKS,
    "captured": _NETWORKS,
    "compiled": _NETWORKS,
    "float8": _FLOAT8,
    "float8-compiled": _FLOAT8,
}
"""Sections with a line for each case and a column for each variant: keys of a case, and the variant that others are
compared with."""
_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "optimizer": {
        "AdamW": "kind",
        "ms": "median_ms",
        "to fused": "ratio",
        "spread": "ratio_iqr",
        "peak MiB above the start": "peak_bytes_above_start",
        "waits": "waits",
    },
    "scaler": {
        "optimizer": "case",
        "parameters": "parameters",
        "ms": "median_ms",
        "to torch's scaler": "ratio",
        "spread": "ratio_iqr",
        "waits, torch": "waits_torch",
        "waits, precast": "waits_precast",
    },
    "products": {
        "product": "case",
        "rule or policy": "kind",
        "ms": "median_ms",
        "to the first": "ratio",
        "spread": "ratio_iqr",
        "error": "relative_error",
    },
    "observers": {
        "network": "case",
        "step": "kind",
        "ms": "median_ms",
        "to plain": "ratio",
        "spread": "ratio_iqr",
    },
}


def _ratios(rows: Rows, keys: Sequence[str], baseline: str) -> list[str]:
    """A line for each case: the time of the baseline, and each variant's ratio to it with its spread."""
    measured = [row for row in rows if "ratio" in row]
    shown = [key for key in keys if any(row.get(key) is not None for row in measured)]
    kinds = [k for k in dict.fromkeys(row["kind"] for row in measured) if k != baseline]
    cases: dict[tuple[str, ...], dict[str, str]] = {}
    for row in measured:
        case = cases.setdefault(tuple(_cell(key, row.get(key)) for key in shown), {})
        if row["kind"] == baseline:
            case[baseline] = _cell("median_ms", row.get("median_ms"))
            continue
        if "bfloat16_ms" in row:
            case[baseline] = _cell("bfloat16_ms", row["bfloat16_ms"])
        spread = f" ({row['ratio_iqr']:.2g})" if "ratio_iqr" in row else ""
        case[row["kind"]] = f"{row['ratio']:.3g}{spread}"
    head = [*shown, f"{baseline}, ms", *kinds]
    lines = [
        [*case, *(cells.get(kind, "") for kind in (baseline, *kinds))]
        for case, cells in cases.items()
    ]
    failed = _cells([row for row in rows if row not in measured], dict.fromkeys(head, ""))
    return _table(head, [*lines, *failed])


def _cells(rows: Rows, columns: Mapping[str, str]) -> list[list[Any]]:
    cells = []
    for row in rows:
        error = row.get("error") or row.get("skipped")
        if error:
            name = row.get("kind") or row["unit"]
            cells.append([f"{name}: {str(error).splitlines()[0]}", *[""] * (len(columns) - 1)])
        else:
            cells.append([_cell(key, row.get(key)) for key in columns.values()])
    return cells


def _cell(key: str, value: Any) -> str:
    if "bytes" in key and isinstance(value, int):
        return f"{value / 2**20:,.0f}"
    return f"{value:.3g}" if isinstance(value, float) else str("" if value is None else value)


def _table(head: list[str], rows: Iterable[list[Any]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    ]


def _left(before: Rows) -> list[Part]:
    """The parts that did not do what they should, with the tests that failed; of a first run all."""
    ended = {row["unit"]: row for row in before if row["section"] == "parts"}
    tests = ended.get("tests", {}).get("failed", [])
    wrong = {row["section"] for row in before if "error" in row}
    done = {name for name, row in ended.items() if not row["code"] and name not in wrong}
    return [part for part in parts(tests) if part.name not in done]


def _kept(before: Rows, remaining: Iterable[Part]) -> Rows:
    """The rows of another run that need not be made again."""
    again = {(row["section"], row["unit"]) for row in before if row.get("error")}
    again |= {("parts", part.name) for part in remaining}
    return [row for row in before if (row["section"], row["unit"]) not in again]


def _outcome(
    part: Part,
    out: Path,
    limit: float,
    environment: Mapping[str, str] | None,
    running: set[subprocess.Popen[bytes]],
) -> dict[str, Any]:
    """The row of a part, whose process is in `running` until it ends."""
    log = out / "logs" / f"{part.name.replace(' ', '-')}.txt"
    log.parent.mkdir(exist_ok=True)
    begin = time.monotonic()
    code = 124
    if limit > 0:
        command = [sys.executable, *(argument.format(out=out) for argument in part.arguments)]
        with log.open("w", encoding="utf-8") as file:
            code = _within(limit, command, file, environment, running)
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", text, re.MULTILINE)
    ending = {0: "", 124: "out of time; "}.get(code, f"exit code {code}; ")
    return {
        "section": "parts",
        "unit": part.name,
        "code": code,
        "seconds": round(time.monotonic() - begin),
        "result": ending + part.result(text),
        "failed": [name for name, _ in failed],
        "errors": [message for _, message in failed if message],
    }


def _within(
    limit: float,
    command: list[str],
    file: Any,
    environment: Mapping[str, str] | None,
    running: set[subprocess.Popen[bytes]],
) -> int:
    """The exit code of a command that is interrupted, then killed, where it takes too long."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=file,
        stderr=subprocess.STDOUT,
        preexec_fn=_hear_interrupts,  # noqa: PLW1509 -- two system calls, no lock
    )
    running.add(process)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            process.wait()
        return 124
    finally:
        running.discard(process)


def _hear_interrupts() -> None:
    """Let a process receive Ctrl-C, which those started in the background by a shell ignore."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if re.search(r"\d+ (passed|failed|skipped)", line)]
    return lines[-1].strip("= ") if lines else "no summary"


def _environment(wheels: Path | None, site: Path) -> dict[str, str]:
    """Return the environment of the parts: this source tree, and the wheels of a folder, installed for the run."""
    path = [str(ROOT / "src"), str(ROOT / "lint" / "src"), str(ROOT)]
    if wheels is not None:
        install = [
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--target",
            str(site),
        ]
        subprocess.run([sys.executable, *install, *map(str, wheels.glob("*.whl"))], check=True)
        path.append(str(site))
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*path, *([before] if before else [])])}


def files_of_tests() -> list[str]:
    """The files with tests for a GPU: others may import packages that a GPU machine lacks."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [path for path in tests if "mark.gpu" in path.read_text(encoding="utf-8")]
    names = [str(path.relative_to(ROOT)) for path in marked]
    return [name for name in names if name != "tests/project/test_gpu_tool.py"]


def _write(machine: Mapping[str, str], out: Path, *, into_docs: bool) -> Path:
    """The page and the data, and one archive of all logs."""
    rows = _read(out / STATE)
    docs = ROOT / "docs" if into_docs else out
    data = docs / "data" if into_docs else out
    text = json.dumps({"machine": machine, "rows": rows}, indent=1)
    (data / "gpu.json").write_text(text + "\n", encoding="utf-8")
    (docs / "gpu.md").write_text(page(machine, rows), encoding="utf-8")
    if (out / "logs").exists():
        with tarfile.open(out / "logs.tar.gz", "w:gz") as archive:
            archive.add(out / "logs", "logs")
    return docs / "gpu.md"


def _read(path: Path) -> Rows:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


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
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="the most that it takes")
    parser.add_argument("--redo", type=Path, help="the gpu.jsonl of another run")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install for this run")
    parser.add_argument("--trial", action="store_true", help="all parts side by side")
    parser.add_argument("--only", default="", help="words in the names of parts, with commas")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
