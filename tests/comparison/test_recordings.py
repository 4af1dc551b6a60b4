"""Recordings: they change no value, survive the end of the program, and are refused with one clear error."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import precast
from precast.comparison.recording_file import RecordingReader, Row
from precast.errors import ComparisonError, OutputError
from tests.comparison import faults
from tests.comparison.networks import NETWORKS


def _rows(path: Path) -> list[Row]:
    with contextlib.closing(RecordingReader(path)) as reader:
        return [row for step in reader.steps() for row in step.rows.values()]


def _trained(network: str, *, in_region: bool) -> faults.Program:
    return faults.program_of(network, in_region=in_region)


def _values(program: faults.Program) -> list[Tensor]:
    return [each.detach().clone() for each in program.model.state_dict().values()]


def _run_plain(program: faults.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(faults, "record", lambda *_, **__: contextlib.nullcontext())
        faults.run(program, Path("unused"))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("level", ["operations", "modules"])
def test_recording_changes_no_bit(
    network: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_region = network in {"decoder", "vit", "moe"}
    recorded, plain = (_trained(network, in_region=in_region) for _ in range(2))
    faults.run(recorded, tmp_path / "a.run", level=level)
    _run_plain(plain, monkeypatch)
    for one, other in zip(_values(recorded), _values(plain), strict=True):
        assert torch.equal(one, other)


def test_a_recording_holds_no_tensor_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    with precast.record(tmp_path / "a.run", model):
        model(torch.randn(100, 64)).sum().backward()
    assert (tmp_path / "a.run").stat().st_size < 64 * 64 * 4 * 3
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.nn.Module.__call__.__module__ == "torch.nn.modules.module"


@pytest.mark.parametrize("interrupts", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_program_leaves_a_readable_file(
    interrupts: signal.Signals, tmp_path: Path
) -> None:
    program = f"""
        import os, signal, torch, precast
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with precast.record("a.run", model):
            for step in range(5):
                if step == 3:
                    os.kill(os.getpid(), {int(interrupts)})
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode != 0
    reader = RecordingReader(tmp_path / "a.run")
    steps = [each.step for each in reader.steps()]
    assert steps[:2] == [0, 1]
    assert reader.is_cut == (interrupts == signal.SIGKILL)
    reader.close()
    difference = precast.compare(tmp_path / "a.run", tmp_path / "a.run")
    assert difference.equal
    assert any("has no end" in note for note in difference.notes) == (interrupts == signal.SIGKILL)


def test_a_file_that_is_cut_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    faults.run(_trained("gat", in_region=False), tmp_path / "a.run")
    content = (tmp_path / "a.run").read_bytes()
    header = content.index(b"\n") + 1
    whole = len(_rows(tmp_path / "a.run"))
    counts = []
    for end in range(header, len(content), len(content) // 23):
        (tmp_path / "cut.run").write_bytes(content[:end])
        reader = RecordingReader(tmp_path / "cut.run")
        counts.append(sum(len(step.rows) for step in reader.steps()))
        assert reader.is_cut
        reader.close()
    assert counts == sorted(counts)
    assert 0 < counts[-1] <= whole


def test_steps_and_modules_are_selected(tmp_path: Path) -> None:
    program = _trained("decoder", in_region=False)
    faults.run(program, tmp_path / "a.run", steps=(1, 2), modules="blocks.0*")
    reader = RecordingReader(tmp_path / "a.run")
    steps = list(reader.steps())
    reader.close()
    operations = [row for row in steps[0].rows.values() if row.kind == "operation"]
    assert [each.step for each in steps] == [1]
    assert operations
    assert all(row.module.startswith("blocks.0") for row in operations)


def test_calls_without_gradients_are_steps(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    with precast.record(tmp_path / "a.run"), torch.no_grad():
        for _ in range(3):
            model(torch.ones(3, 4))
    reader = RecordingReader(tmp_path / "a.run")
    assert [each.step for each in reader.steps()] == [0, 1, 2]
    reader.close()


def test_a_pattern_of_writes_into_one_memory_keeps_all_writers(tmp_path: Path) -> None:
    """A cache that is written at each token: an early write that differs is the cause, not the late read."""

    class Cache(nn.Module):
        def __init__(self, slope: float) -> None:
            super().__init__()
            self.weight, self.slope = nn.Parameter(torch.ones(4)), slope

        def forward(self, x: Tensor) -> Tensor:
            cache = torch.zeros(3, 4)
            for i in range(3):
                cache[i] = nn.functional.leaky_relu(-x * self.weight, self.slope if i == 0 else 0.1)
            return cache.sum()

    for name, slope in (("a", 0.1), ("b", 0.2)):
        with precast.record(tmp_path / f"{name}.run"), torch.no_grad():
            Cache(slope)(torch.ones(4))
    cause = precast.compare(tmp_path / "a.run", tmp_path / "b.run").cause
    assert cause is not None
    assert cause.operation == "leaky_relu"
    assert "0.1 against 0.2" in cause.difference


def test_a_file_grows_by_less_than_a_mebibyte_a_step_for_a_hundred_layers(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(100)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    sizes = []
    with precast.record(tmp_path / "a.run", model, level="modules"):
        for _ in range(5):
            sizes.append((tmp_path / "a.run").stat().st_size)
            model(torch.ones(4, 16)).sum().backward()
            optimizer.step()
    grown = [after - before for before, after in itertools.pairwise(sizes)]
    assert max(grown) < 2**20
    assert grown[3] == pytest.approx(grown[2], rel=0.05)  # the first step has the weights, too


def test_a_weight_that_is_written_between_steps_is_the_cause(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    before = [each.detach().clone() for each in model.parameters()]
    for name in ("a", "b"):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
        with precast.record(tmp_path / f"{name}.run", model, level="modules"), torch.no_grad():
            model(torch.ones(3, 4))
            if name == "b":
                model.get_parameter("1.bias").add_(1.0)
            model(torch.ones(3, 4))
    cause = precast.compare(tmp_path / "a.run", tmp_path / "b.run").cause
    assert cause is not None
    assert (cause.kind, cause.operation, cause.step) == ("weight", "1.bias", 1)


def test_slices_of_one_tensor_are_inputs_of_their_own(tmp_path: Path) -> None:
    model, data = nn.Linear(4, 2), torch.randn(6, 4)
    for name in ("a", "b"):
        batches = data.split(2)  # views of one memory
        with precast.record(tmp_path / f"{name}.run", model), torch.no_grad():
            for batch in batches:
                model(batch)
        data = data.clone()
        data[3] += 1
    cause = precast.compare(tmp_path / "a.run", tmp_path / "b.run").cause
    assert cause is not None
    assert (cause.kind, cause.step) == ("input", 1)


def test_a_network_compiled_by_dynamo_is_aligned_at_its_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(4, 8)
    with precast.record(tmp_path / "a.run", model):
        model(x).sum().backward()
    compiled = torch.compile(model, backend="aot_eager")
    with precast.record(tmp_path / "b.run", model):
        compiled(x).sum().backward()
    same = precast.compare(tmp_path / "a.run", tmp_path / "b.run", bound=1e-5)
    assert same.within_bound
    assert same.cause is None or same.cause.kind == "order"
    with torch.no_grad():
        model[2].weight += 0.01  # type: ignore[operator]
    with precast.record(tmp_path / "c.run", model):
        compiled(x).sum().backward()
    cause = precast.compare(tmp_path / "a.run", tmp_path / "c.run").cause
    assert cause is not None
    assert (cause.kind, cause.operation) == ("weight", "2.weight")


# --- errors ---


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "other").write_text('{"schema": 1, "precast": "0.1.0"}\n')
    for name in ("text", "other", "missing"):
        with pytest.raises(ComparisonError, match=name):
            precast.compare(tmp_path / name, tmp_path / name)
    with (
        pytest.raises(OutputError, match="was not written by precast"),
        precast.record(tmp_path / "text"),
    ):
        pass


def test_a_later_format_is_refused_with_the_version(tmp_path: Path) -> None:
    with precast.record(tmp_path / "a.run"):
        pass
    line = json.loads((tmp_path / "a.run").read_bytes().partition(b"\n")[0])
    line |= {"schema": 99, "precast": "9.9"}
    (tmp_path / "a.run").write_text(json.dumps(line) + "\n")
    with pytest.raises(ComparisonError, match=r"precast 9\.9 in format 99"):
        precast.compare(tmp_path / "a.run", tmp_path / "a.run")


def test_an_empty_recording_and_other_models_are_refused(tmp_path: Path) -> None:
    with precast.record(tmp_path / "empty.run"):
        pass
    for name, model in (("a", nn.Linear(4, 2)), ("b", nn.Conv1d(1, 1, 3))):
        with precast.record(tmp_path / f"{name}.run", level="modules", modules="none"):
            model(torch.ones(1, 1, 4))
    with pytest.raises(ComparisonError, match="nothing ran"):
        precast.compare(tmp_path / "empty.run", tmp_path / "a.run")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "all"}, "'operations' or 'modules'"),
        ({"every": 0}, "at least 1"),
        ({"steps": (3, 1)}, "0 <= A < B"),
        ({"model": 3}, "expected a torch.nn.Module"),
    ],
)
def test_wrong_arguments_are_refused(
    options: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ComparisonError, match=message):
        precast.record(tmp_path / "a.run", **options)  # type: ignore[arg-type]


def test_a_page_shows_the_cause_and_escapes_text(tmp_path: Path) -> None:
    for name, bias in (("a", 0.0), ("b", 0.5)):
        model = nn.Sequential()
        model.add_module("<i>layer", nn.Linear(4, 2))
        torch.manual_seed(0)
        nn.init.constant_(model[0].weight, 0.1)
        nn.init.constant_(model[0].bias, bias)
        with precast.record(tmp_path / f"{name}.run", model):
            model(torch.ones(3, 4)).sum().backward()
    difference = precast.compare(tmp_path / "a.run", tmp_path / "b.run")
    difference.save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "weight: &lt;i&gt;layer" in page
    assert "<i>layer" not in page
    difference.save(tmp_path / "data.json")
    assert json.loads((tmp_path / "data.json").read_text())["cause"]["kind"] == "weight"
    difference.save(tmp_path / "page.html")  # precast's own file is replaced
    precast.compare(tmp_path / "a.run", tmp_path / "a.run").save(tmp_path / "page.html")
    assert "equal in each bit" in (tmp_path / "page.html").read_text()


# --- the command line ---


def _command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "precast", *words],
        cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip


def test_two_programs_are_recorded_and_compared(tmp_path: Path) -> None:
    program = """
        import sys, torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8, eps=float(sys.argv[1])))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(program))
    for name, eps in (("a", "1e-5"), ("b", "1e-5"), ("c", "1e-3")):
        words = ("run", "--json", f"{name}.json", "--record", f"{name}.run", "train.py", eps)
        done = _command(tmp_path, *words)
        assert done.returncode == 0, done.stderr
        assert f"precast compare {name}.run" in done.stderr
    equal = _command(tmp_path, "compare", "a.run", "b.run")
    assert equal.returncode == 0, equal.stderr
    assert "Equal" in equal.stdout
    different = _command(tmp_path, "compare", "a.run", "c.run", "--json")
    assert different.returncode == 1, different.stderr
    plain = json.loads(different.stdout)
    assert plain["equal"] is plain["within_bound"] is False
    assert plain["cure"] is None
    assert plain["cause"]["kind"] == "operation"
    assert plain["cause"]["module"] == "1"
    assert plain["cause"]["difference"] == "eps=1e-05 against 0.001"
    assert plain["cause"]["source"].startswith("train.py:7")
    assert plain["first_bit"]["operation"] == plain["cause"]["operation"]
    assert _command(tmp_path, "compare", "a.run", "c.run", "--bound", "10").returncode == 0
    missing = _command(tmp_path, "compare", "a.run", "d.run")
    assert missing.returncode == 2
    assert "d.run" in missing.stderr
