"""precast run on programs that train and infer: the same results, to the bit, and a document that is right."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from tests.running.test_run import RUN, assert_alike, both, ended, start, write

TRAIN = """
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return torch.randn(8, generator=generator)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 1)
        self.drop = nn.Dropout(0.1)
    def forward(self, x):
        return self.b(self.drop(self.a(x)).relu())

def bits(tensors):
    return [t.detach().double().sum().item().hex() for t in tensors]

if __name__ == "__main__":
    torch.manual_seed(0)
    print(torch.get_num_threads())
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    method = sys.argv[1] if len(sys.argv) > 1 else "fork"
    loader = DataLoader(Numbers(), 4, num_workers=1, multiprocessing_context=method, shuffle=True)
    for epoch in range(2):
        for x in loader:
            with torch.autocast("cpu", torch.float16):
                loss = net(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            print(loss.item().hex(), scaler.get_scale(), flush=True)
        with torch.no_grad(), torch.autocast("cpu"):
            print(bits([net.eval()(x)]))
        net.train()
    print(bits(net.parameters()), bits(s for p in optimizer.state.values() for s in p.values()))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_training_program_computes_the_same_bits(tmp_path: Path, method: str) -> None:
    write(tmp_path, TRAIN)
    plain, run = both(tmp_path, "program.py", method)
    assert plain.code == 0, plain.stderr
    assert_alike(plain, run)
    document = run.document
    assert document["run"]["steps"] == len(document["steps"]) == 12
    printed = [line.split() for line in plain.stdout.splitlines() if line.startswith("0x")]
    losses = [float.fromhex(line[0]) for line in printed]
    assert [s["loss"] for s in document["steps"] if not s["skipped"]] == pytest.approx(
        [x for x, s in zip(losses, document["steps"], strict=True) if not s["skipped"]], rel=1e-6
    )
    scales = [2.0**40, *(float(line[1]) for line in printed)]
    assert [s["scale"] for s in document["steps"]] == scales[:-1]
    skipped = [after < before for before, after in itertools.pairwise(scales)]
    assert [s["skipped"] for s in document["steps"]] == skipped
    assert document["run"]["skipped"] == sum(skipped) > 0
    assert all(bool(s["names"]) == s["skipped"] for s in document["steps"])
    names = {name for s in document["steps"] for name in s["names"]}
    assert names <= {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert names, "the first scale is far too high"
    assert document["run"]["traced"] == [2, 5]
    counts = {(c["op"], c["rule"]): c["calls"] for c in document["counts"]}
    assert counts["linear", "lower"] == 2 * 14  # two layers in twelve steps and two evaluations
    assert document["trace"]["totals"]["steps"] == 3  # skipped or not
    assert {row["module"] for row in document["trace"]["rows"]} >= {"a", "b"}
    assert "12 steps" in run.ours[0]


def test_inference_has_steps_and_health_is_watched_where_asked_for(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).eval()
        with torch.inference_mode(), torch.autocast("cpu"):
            for _ in range(4):
                print(model(torch.randn(3, 4)).sum().item().hex())
        """,
    )
    asked = [*RUN, "--health", "--steps", "1:2", "--json", "out.json", "program.py"]
    plain = ended(start([sys.executable, "program.py"], tmp_path), tmp_path)
    run = ended(start(asked, tmp_path), tmp_path)
    assert_alike(plain, run)
    assert run.document["run"]["steps"] == 4
    assert run.document["run"]["traced"] == [1, 2]
    assert [m["name"] for m in run.document["health"]["modules"]] == ["0", "1"]
    assert all(step["loss"] is None for step in run.document["steps"])


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            "5:9",
            "No operation was traced: --steps 5:9 begins after the last of 1 step; --steps 0:1",
        ),
        ("0:1", None),
    ],
)
def test_the_summary_says_where_no_step_was_traced(
    tmp_path: Path, asked: str, sentence: str | None
) -> None:
    write(
        tmp_path,
        """
        import torch
        with torch.no_grad(), torch.autocast("cpu"):
            torch.nn.Linear(4, 1)(torch.randn(3, 4))
        """,
    )
    run = ended(start([*RUN, "--steps", asked, "program.py"], tmp_path), tmp_path)
    text = " ".join(" ".join(run.ours).split())
    assert ("No operation was traced" in text) == (sentence is not None)
    assert (sentence or "") in text


def test_a_program_that_fails_in_its_first_step_is_not_said_to_have_called_no_module(
    tmp_path: Path,
) -> None:
    write(
        tmp_path,
        """
        import torch
        torch.nn.Linear(4, 1)(torch.randn(3, 4)).sum().backward()
        raise ValueError("no")
        """,
    )
    plain, run = both(tmp_path, "program.py")
    assert_alike(plain, run)
    text = " ".join(run.ours)
    assert "No training step finished, so no operation was traced." in text
    assert "no module" not in text


FAILS = """
import torch

def forward(x):
    with torch.autocast("cpu"):
        return torch.nn.functional.linear(x, torch.ones(3, 3))

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x
    @staticmethod
    def backward(ctx, g):
        raise ValueError("in backward")

class Model(torch.nn.Module):
    def forward(self, x):
        return forward(x)
"""


@pytest.mark.parametrize(
    ("call", "policy"),
    [
        ("Model()(torch.ones(2, 2))", "lean"),
        ("forward(torch.ones(2, 2))", "torch"),
        ("Fails.apply(torch.ones(1, requires_grad=True)).sum().backward()", "torch"),
    ],
)
def test_a_traceback_is_the_programs(tmp_path: Path, call: str, policy: str) -> None:
    write(tmp_path, f"{FAILS}\n{call}")
    plain = ended(start([sys.executable, "program.py"], tmp_path), tmp_path)
    command = [*RUN, "--policy", policy, "--steps", "0:1", "--json", "out.json", "program.py"]
    run = ended(start(command, tmp_path), tmp_path)
    assert plain.code == 1
    assert_alike(plain, run)
    assert run.document["run"]["ended"] == "exception"


@pytest.mark.parametrize(
    "first",
    [
        "import precast; precast.GradScaler",
        "from precast.grad_scaler.scaler import GradScaler",
        "import importlib.util; assert importlib.util.find_spec('torch').loader.get_code; import torch",
    ],
)
def test_whatever_loads_torch_first_it_is_watched_from_then_on(tmp_path: Path, first: str) -> None:
    write(
        tmp_path,
        f"""
        {first}
        import sys, torch
        from torch.amp import GradScaler
        print(GradScaler.__module__, hasattr(GradScaler.step, "__wrapped__"))
        print(type(torch.__loader__).__name__)
        with torch.no_grad(), torch.autocast("cpu"):
            torch.nn.Linear(2, 2)(torch.ones(1, 2))
        """,
    )
    done = ended(start([*RUN, "--json", "out.json", "program.py"], tmp_path), tmp_path)
    assert done.code == 0, done.stderr
    assert done.stdout == "torch.amp.grad_scaler True\nSourceFileLoader\n"
    assert done.document["run"]["steps"] == 1
    assert done.document["counts"][0]["op"] == "linear"


OTHER_WAYS = """
import threading, torch, torch.fx
from torch._dynamo.utils import counters
torch.manual_seed(0)
x = torch.ones(1, 8)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
compiled, scripted = torch.compile(net, backend="eager"), torch.jit.script(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(4):
    with torch.autocast("cpu"):
        loss = compiled(scripted(torch.randn(4, 8))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
print(dict(counters["stats"]), dict(counters["graph_break"]))
for way in (torch.jit.trace(net, x), torch.fx.symbolic_trace(net), torch.export.export(net, (x,)).module()):
    print(way(x).item().hex())
weight = net[0].weight.detach()
f = torch.func.grad(lambda w: torch.func.functional_call(net, {"0.weight": w}, x).sum())
print(f(weight).sum().item().hex())
thread = threading.Thread(target=lambda: print(net(x).item().hex()))
thread.start()
thread.join()
"""


def test_compiled_scripted_traced_and_exported_models_are_what_they_are(tmp_path: Path) -> None:
    write(tmp_path, OTHER_WAYS)
    plain = ended(start([sys.executable, "program.py"], tmp_path), tmp_path)
    asked = [*RUN, "--steps", "1:3", "--json", "out.json", "program.py"]
    run = ended(start(asked, tmp_path), tmp_path)
    assert plain.code == 0, plain.stderr
    assert_alike(plain, run)
    assert run.document["run"]["steps"] == 4
    assert run.document["counts"][0]["calls"] == 12  # three layers in four steps


def test_ranks_write_a_report_each_and_one_together(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        import os, torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        torch.manual_seed(dist.get_rank())
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            with torch.autocast("cpu"):
                loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.destroy_process_group()
        raise SystemExit(0)
        """,
    )
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--standalone", "--nproc-per-node", "2", "-m", "precast", "run"]
    (tmp_path / "r.rank1.json").write_text('{"schema":0,"precast":"older"}')
    report = ["--report", "r.html", "--json", "r.json", "program.py"]
    done = ended(start([*command, *report], tmp_path), tmp_path)
    assert done.code == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("r.*")) == sorted(
        f"r.{name}"
        for name in ("html", "json", "rank0.html", "rank0.json", "rank1.html", "rank1.json")
    )
    merged = json.loads((tmp_path / "r.json").read_text())
    assert [rank["run"]["rank"] for rank in merged["ranks"]] == [0, 1]
    assert all(len(rank["steps"]) == 4 for rank in merged["ranks"])
    losses = [[step["loss"] for step in rank["steps"]] for rank in merged["ranks"]]
    assert losses[0] != losses[1]
    by_hand = [
        str(Path(sys.executable).with_name("precast")),
        *("run", "--merge", "--report", "again.html"),
        *("r.rank0.json", "r.rank1.json"),
    ]
    again = ended(start(by_hand, tmp_path), tmp_path)
    assert (again.code, again.stdout) == (0, "again.html\n")
    assert (tmp_path / "again.html").stat().st_size > 1000


OVERFLOWS = """
import sys, torch
torch.manual_seed(0)
kind, first = sys.argv[1], float(sys.argv[2])
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
settings = {"foreach": False, "fused": True} if kind == "fused" else {}
optimizer = torch.optim.Adam(model.parameters(), 0.01, **settings)
scaler = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=3)
for step in range(60):
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(8, 4)).float().square().mean()
    if step > 8 and kind == "loss":
        loss = loss * torch.inf
    elif step > 8 and kind == "floor":
        loss = loss + (loss * 0).sqrt()  # whose gradient is NaN
    elif step > 8:
        loss = loss * 1e38 * 1e30
    scaler.scale([loss] if step % 2 else loss)
    scaler.scale(loss).backward()
    if step % 3 == 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(loss.item().hex(), scaler.get_scale().hex(), scaler.state_dict(), type(scaler))
print([parameter.sum().item().hex() for parameter in model.parameters()])
"""


@pytest.mark.parametrize(
    ("kind", "first", "reason"),
    [
        ("loss", "1024.0", "loss"),
        ("fused", "1024.0", "loss"),
        ("floor", "1e-20", "floor"),
        ("loss", "1e-20", "loss"),
    ],
)
def test_a_run_whose_scaler_would_give_up_goes_on_as_alone(
    tmp_path: Path, kind: str, first: str, reason: str
) -> None:
    write(tmp_path, OVERFLOWS)
    asked = ["-W", "error", "program.py", kind, first]
    plain = ended(start([sys.executable, *asked], tmp_path), tmp_path)
    watched = [sys.executable, "-W", "error", "-m", "precast", "run", "--json", "out.json"]
    run = ended(start([*watched, *asked[2:]], tmp_path), tmp_path)
    assert plain.code == 0, plain.stderr
    assert_alike(plain, run)
    document = run.document
    assert document["run"]["steps"] == 60
    assert [step["skipped"] for step in document["steps"]] == [step > 8 for step in range(60)]
    [diagnosis] = document["diagnoses"]
    assert diagnosis["reason"] == reason
    assert diagnosis["step"] == (
        51 if kind == "floor" else 48
    )  # the fortieth skipped, there after the scale has fallen
    assert diagnosis["names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    said = " ".join(line.strip() for line in run.ours)
    assert f"At step {diagnosis['step']} no lower scale would have helped" in said


def test_a_scaler_of_precasts_that_the_program_names_stops_it_as_alone(tmp_path: Path) -> None:
    text = OVERFLOWS.replace("import sys, torch", "import sys, torch, precast")
    write(tmp_path, text.replace("torch.amp.GradScaler(", "precast.GradScaler("))
    plain, run = both(tmp_path, "program.py", "loss", "1024.0")
    assert plain.code == 1
    assert "BrokenModelError" in plain.stderr
    assert (run.code, run.stdout) == (plain.code, plain.stdout)
    assert run.theirs[-1].startswith("precast.errors.BrokenModelError: ")
    [diagnosis] = run.document["diagnoses"]
    assert diagnosis["step"] == len(plain.stdout.splitlines())
