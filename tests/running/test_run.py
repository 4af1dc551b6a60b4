"""precast run: a program runs, prints, fails and ends as it does under python; its ending is in the document."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from precast.running.terminal_summary import said

OLD = '<!doctype html>\n<meta name="generator" content="precast">the old one'
RUN = [str(Path(sys.executable).with_name("precast")), "run"]


@dataclass
class Done:
    """How a program ended."""

    code: int
    stdout: str
    stderr: str
    document: dict[str, Any]
    folder: Path

    @property
    def ours(self) -> list[str]:
        """What precast said: lines that begin with its name, and those that they go on in."""
        lines = self.stderr.splitlines()
        begins = [i for i, line in enumerate(lines) if line.startswith("precast: ")]
        return lines[begins[0] :] if begins else []

    @property
    def theirs(self) -> list[str]:
        lines = self.stderr.splitlines()
        return lines[: len(lines) - len(self.ours)]


def start(command: list[str], folder: Path, **extra: str) -> subprocess.Popen[str]:
    # Empty is as if unset: whether what is printed waits in a buffer is then the same everywhere.
    environment = {**os.environ, "PYTHONWARNINGS": "", "PYTHONUNBUFFERED": "", **extra}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,  # noqa: PLW1509 -- one system call, no lock
    )


def hear_interrupts() -> None:
    """What a shell starts in the background ignores Ctrl-C, under nohup a hang-up, and so does all that it starts."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def ended(process: subprocess.Popen[str], folder: Path) -> Done:
    stdout, stderr = process.communicate(timeout=300)
    path = folder / "out.json"
    document = json.loads(path.read_text()) if path.exists() else {}
    return Done(process.returncode, stdout, stderr, document, folder)


def write(folder: Path, text: str, name: str = "program.py") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(textwrap.dedent(text))


def both(folder: Path, *arguments: str) -> tuple[Done, Done]:
    """The program under python, and under precast run."""
    plain = ended(start([sys.executable, *arguments], folder), folder)
    return plain, ended(start([*RUN, "--json", "out.json", *arguments], folder), folder)


def assert_alike(plain: Done, run: Done) -> None:
    assert run.stdout == plain.stdout
    assert run.code == plain.code
    assert run.theirs == plain.stderr.splitlines()
    assert run.ours
    assert all(len(line) <= 80 for line in run.ours)


SURROUNDINGS = '''
"""A docstring."""
import inspect, os, pickle, sys

class Thing:
    def __eq__(self, other):
        return type(self) is type(other)

def source():
    return inspect.getsource(Thing)

if __name__ == "__main__":
    known = ["__annotations__", "__cached__", "__doc__", "__file__", "__name__", "__package__"]
    print(sys.argv, sys.path[0], [globals()[name] for name in known], sorted(globals()))
    print(type(__builtins__), type(__loader__).__name__, __spec__ and __spec__.name)
    main = sys.modules["__main__"]
    print(main.__dict__ is globals(), pickle.loads(pickle.dumps(Thing())) == Thing(), source())
    import beside
    print(os.path.basename(beside.__file__), beside.name, os.getcwd(), __debug__, sys.flags.optimize)
    import atexit
    atexit.register(lambda: print("at exit", pickle.loads(pickle.dumps(Thing())) == Thing()))
    print("on stderr", file=sys.stderr)
    print(os.path.exists("__pycache__/program.cpython.pyc"), sorted(os.listdir()))
'''


@pytest.mark.parametrize(
    "arguments",
    [
        ("program.py", "--lr", "1", "-m", "--json", "x"),
        ("inner/program.py",),
        ("link.py", "--help"),
        ("-m", "inner.program", "--", "a"),
        ("-m", "inner"),
        ("folder",),
        ("archive.zip", "b"),
    ],
    ids=" ".join,
)
def test_a_program_finds_what_python_gives_it(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    write(tmp_path, SURROUNDINGS)
    for folder in ("inner", "folder"):
        write(tmp_path, SURROUNDINGS, f"{folder}/program.py")
        write(tmp_path, SURROUNDINGS, f"{folder}/__main__.py")
        write(tmp_path, "name = __name__", f"{folder}/beside.py")
    write(tmp_path, "import sys; print('packages see', sys.argv)", "inner/__init__.py")
    write(tmp_path, "name = 'outside'", "beside.py")
    (tmp_path / "link.py").symlink_to("inner/program.py")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        for name in ("__main__.py", "beside.py"):
            archive.write(tmp_path / "folder" / name, name)
    plain, run = both(tmp_path, *arguments)
    assert plain.code == 0, plain.stderr
    assert_alike(plain, run)
    assert run.document["run"]["command"] == list(arguments)


STDIN = """
import sys
main = sys.modules["__main__"]
print(sys.argv, sys.path[0] == "", sorted(vars(main)), main, main.__loader__, main.__spec__)
print(sys.stdin.read() == "", main.__file__)
class Thing: pass
import inspect, pickle
print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
def fails(): inspect.getsource(Thing)
fails()
"""


def test_a_program_is_read_from_stdin(tmp_path: Path) -> None:
    results = []
    for command in ([sys.executable], [*RUN, "--json", "out.json"]):
        done = subprocess.run(
            [*command, "-", "--lr", "1"],
            check=False,
            input=STDIN,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        document = tmp_path / "out.json"
        told = json.loads(document.read_text()) if document.exists() else {}
        results.append(Done(done.returncode, done.stdout, done.stderr, told, tmp_path))
    assert_alike(*results)
    assert results[1].document["run"]["command"] == ["-", "--lr", "1"]


INTROSPECTION = '''
"""Doc."""
import dataclasses, doctest, inspect, pickle, sys, typing

class Thing:
    """A thing.

    >>> Thing().x
    1
    """
    x: "int" = 1

@dataclasses.dataclass
class Data:
    a: "Thing"

def function(n=1):
    # comment
    return lambda: n

import __main__
main = sys.modules["__main__"]
print(main is __main__, vars(main) is globals(), repr(main), main.__spec__)
print(inspect.getsource(Thing), inspect.getsource(function()), inspect.getsource(main) == open(__file__).read())
print(inspect.getfile(main), inspect.getsourcefile(function), inspect.getmodule(Thing) is main)
print(inspect.getmodule(sys._getframe()) is main, inspect.findsource(Data)[1])
print(typing.get_type_hints(Data), pickle.dumps(Thing()), pickle.dumps(function), doctest.testmod())
loader = main.__loader__
print(type(loader), loader.name, loader.path, loader.get_source("__main__") == open(__file__).read())
print(function.__code__.co_filename, function.__module__)
'''


@pytest.mark.parametrize("name", ["program.py", "inner/program.py", "program"])
def test_a_program_that_looks_at_itself_sees_what_it_sees_alone(tmp_path: Path, name: str) -> None:
    write(tmp_path, INTROSPECTION, name)
    plain, run = both(tmp_path, name)
    assert plain.code == 0, plain.stderr
    assert_alike(plain, run)


NAMES = [
    "click",
    "jinja2",
    "rich",
    "report",
    "plotly",
    "markupsafe",
    "tomllib",
    "textwrap",
    "queue",
]


@pytest.mark.parametrize(
    "command", [RUN, [sys.executable, "-m", "precast", "run"]], ids=["precast", "-m"]
)
@pytest.mark.parametrize("arguments", [("program.py",), ("-m", "program")], ids=" ".join)
def test_modules_of_the_program_and_of_precast_may_have_one_name(
    tmp_path: Path, command: list[str], arguments: tuple[str, ...]
) -> None:
    for name in NAMES:
        write(tmp_path, f"print({name!r}, __name__); here = {name!r}", f"{name}.py")
    write(tmp_path, "[rules", "no.toml")
    lines = [f"import {name}; print({name}.here)" for name in NAMES]
    write(
        tmp_path, "\n".join([*lines, "import atexit; atexit.register(lambda: print(jinja2.here))"])
    )
    plain = ended(start([sys.executable, *arguments], tmp_path), tmp_path)
    run = ended(start([*command, "--json", "out.json", *arguments], tmp_path), tmp_path)
    assert plain.code == 0, plain.stderr
    assert_alike(plain, run)
    assert (tmp_path / "precast-report.html").stat().st_size > 100_000


def test_precast_reads_a_policy_beside_a_tomllib_of_the_programs(tmp_path: Path) -> None:
    write(tmp_path, "raise ImportError('not for precast')", "tomllib.py")
    write(tmp_path, 'base = "torch"', "rules.toml")
    write(
        tmp_path,
        "import torch\nwith torch.autocast('cpu'): torch.mm(torch.ones(1, 1), torch.ones(1, 1))",
    )
    command = [*RUN, "--policy", "rules.toml", "--json", "out.json", "program.py"]
    run = ended(start(command, tmp_path), tmp_path)
    assert run.code == 0, run.stderr
    assert run.document["counts"][0]["op"] == "mm"


# --- how it ends ---

ENDINGS = {
    "by itself": ("print('done')", "ended", 0, None),
    "exit": ("import sys; sys.exit(7)", "exit", 7, None),
    "exit without a code": ("raise SystemExit", "exit", 0, None),
    "exit by words": ("import sys; sys.exit('no data')", "exit", 1, "no data"),
    "exit below zero": ("import sys; sys.exit(-1)", "exit", 255, None),
    "exit at once": ("import os; print('lost'); os._exit(9)", "exit", 9, "os._exit(9)"),
    "exit in a thread": (
        "import sys, threading, time\n"
        "def late(): time.sleep(0.2); print('late'); sys.exit(3)\n"
        "threading.Thread(target=late).start()",
        "ended",
        0,
        None,
    ),
    "an exception": (
        "def inner(): raise ValueError('two\\nlines')\ndef outer(): inner()\nouter()",
        "exception",
        1,
        "ValueError: two\nlines",
    ),
    "an exception while another is handled": (
        "try:\n    {}['key']\nexcept KeyError as error:\n    raise RuntimeError('no') from error",
        "exception",
        1,
        "RuntimeError: no",
    ),
    "an exception that click knows": (
        "import click; raise click.UsageError('theirs')",
        "exception",
        1,
        "UsageError: theirs",
    ),
    "one that the shell knows": ("raise BrokenPipeError(32, 'x')", "exception", 1, None),
    "no program": ("def f(:", "exception", 1, None),
    "a hook for exceptions": (
        "import sys\nsys.excepthook = lambda *a: print('hook', a[0], a[2].tb_frame.f_code.co_name)\n1/0",
        "exception",
        1,
        "ZeroDivisionError: division by zero",
    ),
    "a base exception": ("raise GeneratorExit", "exception", 1, "GeneratorExit"),
    "an interrupt": ("raise KeyboardInterrupt('x')", "interrupted", 130, "KeyboardInterrupt: x"),
    "what is like an interrupt": (
        "class Stop(KeyboardInterrupt): pass\nraise Stop",
        "exception",
        1,
        "Stop",
    ),
    "an interrupt in an exit function": (
        "import atexit\natexit.register(lambda: print('bye'))\nraise KeyboardInterrupt",
        "interrupted",
        130,
        "KeyboardInterrupt",
    ),
    "a signal": (
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "interrupted",
        143,
        "SIGTERM",
    ),
    "a signal that the program handles": (
        "import os, signal, sys\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
        "assert signal.signal(signal.SIGTERM, lambda *_: sys.exit(4)) is signal.SIG_DFL\n"
        "os.kill(os.getpid(), signal.SIGTERM)",
        "exit",
        4,
        None,
    ),
    "a child": (
        "import os, sys\nif os.fork(): os.wait(); print('parent')\nelse: print('child'); sys.exit(5)",
        "ended",
        0,
        None,
    ),
    "children that are ended": (
        "import multiprocessing as m, time\n"
        "here, there = m.Pipe()\n"
        "def work(): there.send('ready'); time.sleep(60)\n"
        "c = m.get_context('fork').Process(target=work)\n"
        "c.start(); here.recv(); c.terminate(); c.join(); print(c.exitcode)",
        "ended",
        0,
        None,
    ),
}


@pytest.mark.parametrize(
    ("program", "how", "code", "message"), ENDINGS.values(), ids=ENDINGS.keys()
)
def test_a_program_ends_as_under_python(
    tmp_path: Path, program: str, how: str, code: int, message: str | None
) -> None:
    write(tmp_path, program)
    plain, run = both(tmp_path, "program.py")
    assert_alike(plain, run)
    assert "precast" not in plain.stderr
    said = run.document["run"]
    assert (said["ended"], said["code"]) == (how, code)
    if message is not None or how in {"ended", "exit"}:
        assert said["message"] == message
    assert (tmp_path / "precast-report.html").stat().st_size > 0


def test_the_traceback_of_a_module_begins_in_it(tmp_path: Path) -> None:
    write(tmp_path, "def f():\n    raise ValueError('x')\nf()")
    plain, run = both(tmp_path, "-m", "program")
    lines = plain.stderr.splitlines()
    assert run.theirs == [lines[0], *(line for line in lines[1:] if "<frozen runpy>" not in line)]
    assert run.code == plain.code


def test_ctrl_c_and_a_signal_from_outside(tmp_path: Path) -> None:
    # One line, and no marks of columns: the signal may arrive in either call, and the trace is the same.
    write(tmp_path, "import time\nprint('ready', flush=True); time.sleep(60)")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        results = []
        for command in ([sys.executable], [*RUN, "--json", "out.json"]):
            process = start([*command, "program.py"], tmp_path, PYTHONNODEBUGRANGES="1")
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            results.append(ended(process, tmp_path))
        assert_alike(*results)
        assert results[1].code == -number
        assert results[1].document["run"]["code"] == 128 + number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_the_midst_of_an_operation_ends_the_program_then(
    tmp_path: Path, number: signal.Signals
) -> None:
    # A wait for itself, which gives Python's lock away and does not come back for a signal, as a long operation.
    write(
        tmp_path,
        """
        import ctypes, torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            with torch.autocast("cpu"):
                loss = model(torch.ones(3, 2)).sum()
            loss.backward()
            optimizer.step()
        mutex, system = ctypes.create_string_buffer(256), ctypes.CDLL(None)
        system.pthread_mutex_init(mutex, None)
        system.pthread_mutex_lock(mutex)
        print("ready", flush=True)
        system.pthread_mutex_lock(mutex)
        """,
    )
    process = start([*RUN, "--json", "out.json", "program.py"], tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    run = ended(process, tmp_path)
    assert run.code == -number
    assert run.document["run"]["code"] == 128 + number
    assert run.document["run"]["steps"] == 4
    assert run.document["trace"]["totals"]["steps"] == 2
    assert "interrupted after 4 steps" in run.ours[0]


def test_a_program_that_forks_and_waits_for_signals_sees_nothing_of_the_listener(
    tmp_path: Path,
) -> None:
    write(
        tmp_path,
        """
        import asyncio, os, signal, sys, threading, warnings
        warnings.simplefilter("error")
        import torch
        torch.set_num_threads(1)
        print(signal.set_wakeup_fd(-1), threading.enumerate()[1:], flush=True)
        for _ in range(3):
            torch.nn.Linear(1, 1)(torch.ones(1))
            if os.fork() == 0:
                print(signal.set_wakeup_fd(-1), flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
            print(os.wait()[1], flush=True)

        async def main():
            loop, got = asyncio.get_running_loop(), asyncio.Event()
            loop.add_signal_handler(signal.SIGTERM, got.set)
            os.kill(os.getpid(), signal.SIGTERM)
            await got.wait()
            loop.remove_signal_handler(signal.SIGTERM)
            print("heard")

        asyncio.run(main())
        print(signal.set_wakeup_fd(-1), signal.getsignal(signal.SIGTERM))
        """,
    )
    plain, run = both(tmp_path, "program.py")
    assert plain.code == 0, plain.stderr
    assert_alike(plain, run)


def test_processes_that_are_spawned_find_what_is_defined_in_main(tmp_path: Path) -> None:
    # Flushed: a pool may end its workers before they have written what they print.
    write(
        tmp_path,
        """
        import multiprocessing, sys

        class Job:
            def __call__(self, x):
                return x * x

        print("import", __name__, flush=True)
        if __name__ == "__main__":
            for method in ("spawn", "fork", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.map(Job(), range(3)), flush=True)
        """,
    )
    assert_alike(*both(tmp_path, "program.py"))
    assert_alike(*both(tmp_path, "-m", "program"))


# --- what is asked for wrongly, and output that cannot be written ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.py",), "no script 'none.py'"),
        ((), "expected a script"),
        (("--steps", "5:2", "program.py"), "expected A:B with A < B, as in 2:5, got '5:2'"),
        (("--steps", "five", "program.py"), "expected A:B with A < B, as in 2:5, got 'five'"),
        (("prorgam.py",), "did you mean program.py?"),
        (("program",), "did you mean program.py?"),
        (("folder/none.py",), "no script 'folder/none.py' in "),
        (("package.train", "--lr", "1"), "use -m for a module"),
        (("-m", "program.py", "a"), "got the file program.py; omit -m"),
        (("python3.12", "program.py", "a b"), "pass the script without python"),
        (("--policy", "defualt", "program.py"), "did you mean default?"),
        (("--policy", "bf16", "program.py"), "that is a dtype"),
        (("--policy", "mine.tml", "program.py"), "did you mean mine.toml?"),
        (("--report", "x", "--json", "x", "program.py"), "expected two different files"),
        (("--report", "program.py/x.html", "program.py"), "Nothing was run"),
        (("--json", "folder", "program.py"), "it is a folder"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_runs(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    write(tmp_path, "print('it ran')")
    (tmp_path / "folder").mkdir()
    (tmp_path / "mine.toml").touch()
    done = ended(start([*RUN, *arguments], tmp_path), tmp_path)
    assert done.code == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_summary_names_the_slower_engine_and_the_remedy(tmp_path: Path) -> None:
    write(tmp_path, "import torch")
    command = [*RUN, "--json", "out.json", "program.py"]
    slower = ended(start(command, tmp_path, PRECAST_ENGINE="reference"), tmp_path)
    text = " ".join(line.removeprefix("precast: ").strip() for line in slower.ours)
    assert "slower reference engine, as PRECAST_ENGINE is 'reference'" in text
    assert "unset PRECAST_ENGINE" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("program.py", "--lr", "1"), "write `precast run program.py --lr 1`"),
        (("rnu", "program.py"), "did you mean run"),
        (("xyzzy",), "no command 'xyzzy'"),
    ],
)
def test_an_unknown_command_is_answered_with_the_likely_one(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    write(tmp_path, "print('it ran')")
    done = ended(start([RUN[0], *arguments], tmp_path), tmp_path)
    assert (done.code, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize("columns", [20, 40, 80, 200, 500])
def test_the_summary_is_as_wide_as_the_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = said("some words " * 50, "/a/long/path" * 9).splitlines()
    width = min(max(columns, 40), 200)
    assert width - 10 < max(len(line) for line in lines if "words" in line) < width
    assert "precast: " + "/a/long/path" * 9 in lines or "/a/long/path" * 9 in lines[-1]


def test_without_the_extra_there_are_data_and_no_page(tmp_path: Path) -> None:
    write(tmp_path, "print('it ran')")
    write(tmp_path, "raise ImportError('not here')", "missing/plotly.py")
    here = str(tmp_path / "missing")
    alone = ended(start([*RUN, "program.py"], tmp_path, PYTHONPATH=here), tmp_path)
    assert (alone.code, alone.stdout) == (1, "")
    assert "pip install plotly" in alone.stderr
    asked = [*RUN, "--json", "out.json", "program.py"]
    with_data = ended(start(asked, tmp_path, PYTHONPATH=here), tmp_path)
    assert (with_data.code, with_data.stdout) == (0, "it ran\n")
    assert with_data.document["run"]["ended"] == "ended"
    assert not (tmp_path / "precast-report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "name the files that `precast run --json` wrote"),
        (("none.json",), 1, "cannot read none.json"),
        (("half.json",), 1, "half.json is not a complete JSON file"),
        (("a.json", "a.json"), 1, "one of several documents has no rank"),
        (("a.json", "--report"), 2, "write --report before the files"),
    ],
)
def test_a_report_of_what_is_no_document_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    write(tmp_path, "")
    ended(start([*RUN, "--json", "a.json", "program.py"], tmp_path), tmp_path)
    (tmp_path / "half.json").write_text('{"schema": 1')
    done = ended(start([*RUN, "--merge", "--report", "page.html", *arguments], tmp_path), tmp_path)
    assert (done.code, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "page.html").exists()


def test_a_policy_that_is_not_there_is_said_before_anything_runs(tmp_path: Path) -> None:
    write(tmp_path, "print('it ran')")
    done = ended(start([*RUN, "--policy", "no.toml", "program.py"], tmp_path), tmp_path)
    assert (done.code, done.stdout) == (2, "")
    assert "no policy 'no.toml': neither a preset nor a file" in done.stderr
    assert not (tmp_path / "precast-report.html").exists()


def test_a_policy_may_be_that_of_a_release_of_pytorch(tmp_path: Path) -> None:
    write(tmp_path, "print('it ran')")
    command = [*RUN, "--policy", "torch@1.0", "program.py"]
    done = ended(start(command, tmp_path), tmp_path)
    assert (done.code, done.stdout) == (2, "")
    assert "Allowed: torch@2.11, torch@2.12" in done.stderr
    assert "Nothing was run" in done.stderr
    program = "import torch\nwith torch.autocast('cpu'): print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)"
    write(tmp_path, program)
    command = [*RUN, "--policy", "torch@2.11", "--json", "out.json", "program.py"]
    done = ended(start(command, tmp_path), tmp_path)
    assert (done.code, done.stdout) == (0, "torch.bfloat16\n")
    assert done.document["run"]["policy"]["name"] == "torch@2.11"


def test_a_policy_that_cannot_be_read_ends_the_program_where_it_loads_torch(
    tmp_path: Path,
) -> None:
    write(tmp_path, "try:\n    import torch\nexcept Exception: pass\nprint('it ran')")
    write(tmp_path, "[rules", "wrong.toml")
    done = ended(start([*RUN, "--policy", "wrong.toml", "program.py"], tmp_path), tmp_path)
    assert done.code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert "wrong.toml" in done.stderr
    assert not (tmp_path / "precast-report.html").exists()


@pytest.mark.parametrize("found", [True, False])
def test_the_page_is_opened_at_the_end_where_asked_for(tmp_path: Path, found: bool) -> None:
    write(tmp_path, "print('it ran', flush=True)")
    write(tmp_path, '#!/bin/sh\necho "opened $1"', "browser")
    (tmp_path / "browser").chmod(0o755)
    browser = f"{tmp_path}/browser %s" if found else "nowhere"
    command = [*RUN, "--open", "--report", "r.html", "program.py"]
    done = ended(start(command, tmp_path, BROWSER=browser, PATH="", DISPLAY=""), tmp_path)
    assert done.code == 0, done.stderr
    page = tmp_path / "r.html"
    assert page.exists()
    assert done.stdout == "it ran\n" + (f"opened {page.as_uri()}\n" if found else "")
    assert ("no browser was found to open" in done.stderr) is not found


@pytest.mark.parametrize("option", ["--json", "--report"])
@pytest.mark.parametrize("name", ["program.py", "data.json", "page.html"])
def test_a_file_that_precast_did_not_write_is_left_as_it_is(
    tmp_path: Path, option: str, name: str
) -> None:
    write(tmp_path, "print('it ran')")
    write(tmp_path, '{"lr": 1}', "data.json")
    write(tmp_path, "<!doctype html>", "page.html")
    before = (tmp_path / name).read_bytes()
    done = ended(start([*RUN, option, name, "program.py"], tmp_path), tmp_path)
    assert (done.code, done.stdout) == (2, "")
    said = " ".join(done.stderr.split())
    assert "the file exists and was not written by precast, which does not overwrite it" in said
    ended(start([*RUN, "--json", "out.json", "program.py"], tmp_path), tmp_path)
    merging = [*RUN, "--merge", option, name, "out.json"]
    assert ended(start(merging, tmp_path), tmp_path).code == 1
    assert (tmp_path / name).read_bytes() == before


def test_a_file_that_the_program_writes_meanwhile_stays(tmp_path: Path) -> None:
    command = [*RUN, "--json", "results.json", "program.py"]
    write(tmp_path, "open('results.json', 'w').write('the results')")
    run = ended(start(command, tmp_path, TMPDIR=str(tmp_path)), tmp_path)
    assert run.code == 0
    assert (tmp_path / "results.json").read_text() == "the results"
    assert list(tmp_path.glob("precast-*/results.json"))


def test_reports_are_written_over_reports(tmp_path: Path) -> None:
    write(tmp_path, "print('it ran')")
    for _ in range(2):
        done = ended(start([*RUN, "--json", "a.json", "program.py"], tmp_path), tmp_path)
        assert done.code == 0, done.stderr


def test_a_folder_that_went_away_is_made_again(tmp_path: Path) -> None:
    write(tmp_path, "import shutil, os; shutil.rmtree('out'); os.chdir('/'); print('done')")
    done = ended(start([*RUN, "--report", "out/r.html", "program.py"], tmp_path), tmp_path)
    assert done.code == 0
    assert (tmp_path / "out" / "r.html").exists()


def test_data_can_go_into_a_pipe(tmp_path: Path) -> None:
    write(tmp_path, "print('done', flush=True)")
    command = [*RUN, "--report", "r.html", "--json", "/dev/stdout", "program.py"]
    done = ended(start(command, tmp_path), tmp_path)
    said, _, data = done.stdout.partition("\n")
    assert said == "done"
    assert json.loads(data)["run"]["ended"] == "ended"


def test_a_report_that_cannot_be_written_goes_elsewhere(tmp_path: Path) -> None:
    write(
        tmp_path,
        "import shutil, sys; shutil.rmtree('out'); open('out', 'w').close(); sys.exit(3)",
    )
    (tmp_path / "temporary").mkdir()
    command = [*RUN, "--report", "out/r.html", "program.py"]
    done = ended(start(command, tmp_path, TMPDIR=str(tmp_path / "temporary")), tmp_path)
    assert done.code == 3
    [page] = (tmp_path / "temporary").glob("precast-*/r.html")
    said = "".join(done.ours)
    assert "cannot write" in said
    assert page.parent.name in said
    assert page.with_name("precast.json").exists()


def test_where_nothing_can_be_written_the_summary_is_printed(tmp_path: Path) -> None:
    write(
        tmp_path,
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\nraise SystemExit(6)",
    )
    (tmp_path / "precast-report.html").write_text(OLD)
    done = ended(start([*RUN, "program.py"], tmp_path), tmp_path)
    assert done.code == 6
    said = " ".join(line.strip() for line in done.ours)
    assert "cannot write" in said
    assert "File too large" in said
    assert "no temporary folder could be used" in said
    assert "exited after 0 steps" in said
    assert (tmp_path / "precast-report.html").read_text() == OLD
