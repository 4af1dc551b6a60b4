"""`precast run`: a program does under it what it does under python, and its report tells the truth."""

from __future__ import annotations

import json
from typing import Any

from tests.attack.scenarios import scenario
from tests.attack.tools import program

RUN = ("-m", "precast", "run", "--json", "r.json")

TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(6):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
print(loss.item(), [p.sum().item() for p in model.parameters()])
"""
OVERFLOWS = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
scaler = torch.amp.GradScaler("cpu")
for step in range(50):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(4, 4)).sum() * (float("nan") if step > 3 else 1)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print("to the end", scaler.get_scale())
"""
PROGRAMS = {
    "a training": TRAIN,
    "a float16 training that breaks": OVERFLOWS,
    "sys.exit(3)": "import sys\nprint('bye')\nsys.exit(3)\n",
    "an exception": "print('bye')\nraise KeyError('x')\n",
    "os._exit": "import os\nprint('bye', flush=True)\nos._exit(5)\n",
    "atexit": "import atexit\natexit.register(print, 'last')\nprint('bye')\n",
    "its own source": "import inspect, sys\ndef f(): return 1\nprint(inspect.getsource(f))\n",
    "pickles of its classes": (
        "import pickle\nclass A: x = 1\nprint(type(pickle.loads(pickle.dumps(A()))) is A, A.__module__)\n"
    ),
    "its arguments and path": "import sys\nprint(sys.argv, __name__, __file__, sys.path[0] != '')\n",
    "threads": (
        "import threading, torch\ndef f():\n    with torch.autocast('cpu'):\n        print((torch.ones(1, 1) @ "
        "torch.ones(1, 1)).dtype)\nt = threading.Thread(target=f); t.start(); t.join()\n"
    ),
}


def _as_python(text: str) -> None:
    theirs = program(text, "--lr", "1")
    mine = program(text, "--lr", "1", under=RUN)
    assert mine.returncode == theirs.returncode, mine.stderr[-900:]
    folder = {str(vars(mine)["folder"]): "F", str(vars(theirs)["folder"]): "F"}
    message = [done.stdout for done in (mine, theirs)]
    for path, short in folder.items():
        message = [text.replace(path, short) for text in message]
    first, second = (text.split("\n") for text in message)
    assert first[: len(second) - 1] == second[:-1], message


for _what, _text in PROGRAMS.items():
    scenario(
        "run",
        f"a program with {_what} prints and ends under `precast run` as under python",
        "plain PyTorch",
        name=f"{_what} under run",
        quick=_what in ("sys.exit(3)", "its own source"),
    )(lambda text=_text: _as_python(text))


@scenario(
    "run",
    "files of a program that are named as modules that precast imports are the program's",
    "by hand",
    quick=False,
)
def names_of_our_modules() -> None:
    files = {f"{name}__py": "WHOSE = 'mine'\n" for name in ("click", "jinja2", "report", "rich")}
    text = "import click, jinja2, report, rich\nprint(click.WHOSE, jinja2.WHOSE, report.WHOSE, rich.WHOSE)\n"
    done = program(text, under=RUN, **files)
    assert done.stdout.startswith("mine mine mine mine\n"), done.stderr[-900:]


@scenario("run", "--json never writes over a file that is no report", "by hand")
def a_report_over_the_script() -> None:
    done = program("print(1)\n", under=("-m", "precast", "run", "--json", "main.py"))
    assert (vars(done)["folder"] / "main.py").read_text() == "print(1)\n"
    assert done.returncode == 2, done.returncode


@scenario(
    "run",
    "a policy's rules for modules hold for the models that a program makes",
    "by hand",
    quick=False,
)
def rules_for_modules_under_run() -> None:
    text = TRAIN.replace("print(loss.item()", "print(out, loss.item()").replace(
        "        loss = model(",
        "        out = model[0](torch.ones(1, 8)).dtype\n        loss = model(",
    )
    rules = 'base = "torch"\n[modules]\n"0" = "fp32"\n'
    under = ("-m", "precast", "run", "--json", "r.json", "--policy", "p.toml")
    done = program(text, under=under, p__toml=rules)
    assert done.returncode == 0, done.stderr[-900:]
    assert done.stdout.startswith("torch.float32"), done.stdout[:200]


# --- what the report says ---


def _document(text: str, *options: str, **files: str) -> Any:
    done = program(text, under=(*RUN, *options), **files)
    path = vars(done)["folder"] / "r.json"
    assert path.exists(), done.stderr[-900:]
    return json.loads(path.read_text())


def _words(document: Any) -> str:
    return json.dumps(document["summary"])


@scenario(
    "report",
    "a run in which nothing ran in 16 bits is not said to work in mixed precision",
    "by hand",
    quick=False,
)
def nothing_in_16_bits() -> None:
    rules = 'base = "torch"\n[ops]\nlinear = "fp32"\naddmm = "fp32"\n'
    message = _words(_document(TRAIN, "--policy", "p.toml", p__toml=rules))
    assert "nothing wrong was found" not in message, message


@scenario(
    "report",
    "a run without regions is not called well above a word that it has none",
    "by hand",
    quick=False,
)
def no_regions_at_all() -> None:
    summary = _document(
        TRAIN.replace('torch.autocast("cpu", dtype=torch.bfloat16)', "torch.enable_grad()")
    )["summary"]
    assert not (summary["level"] == "good" and "no mixed precision" in json.dumps(summary)), summary


@scenario(
    "report",
    "what is kept for backward does not grow with the steps that are traced",
    "by hand",
    quick=False,
)
def kept_for_backward() -> None:
    kept = []
    for steps in ("2:3", "2:5"):
        document = _document(TRAIN, "--steps", steps)
        kept.append(_kept(document["summary"]))
    assert kept[0] == kept[1], kept


def _kept(summary: Any) -> list[str]:
    import re

    return re.findall(r"saved for backward[^.]*", json.dumps(summary))


@scenario(
    "report", "the steps of the report are those that the program took", "by hand", quick=False
)
def steps_of_the_report() -> None:
    document = _document(TRAIN)
    assert [step["step"] for step in document["steps"]] == list(range(6))


@scenario(
    "report",
    "the report of a broken training says that steps were lost, and which",
    "by hand",
    quick=False,
)
def lost_steps_are_said() -> None:
    document = _document(OVERFLOWS)
    assert document["summary"]["level"] == "bad", document["summary"]
    assert sum(bool(step.get("skipped")) for step in document["steps"]) >= 46
