"""`precast export`, `precast explain --exported` and `--diff`: files of exported programs, and their contents."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import precast
from precast.cli.main import main
from tests.shipping.exported_models import MODELS

MODELS_FILE = """
import torch
from torch import nn

class Decides(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))

def pair():
    return make(), torch.ones(3, 4)

def decides():
    return Decides(), torch.ones(3, 4)

example = torch.ones(3, 4)
wrong = torch.ones(3, 5)
"""
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "shipped_models.py").write_text(MODELS_FILE)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("shipped_models", None)


def precast_(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def exported(name: str = "model.pt2", *more: str) -> Result:
    return precast_("export", "--model", "shipped_models:pair", "--out", name, *more)


def test_a_model_is_written_read_and_compared() -> None:
    done = exported("model.pt2", "--dtype", "bfloat16", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["weight_bytes"] == {"bfloat16": 2 * (4 * 8 + 8 + 8 * 2 + 2), "float32": 4 * 16}
    program = torch.export.load("model.pt2")
    assert program.module()(torch.ones(3, 4)).dtype is torch.bfloat16
    shown = precast_("explain", "--exported", "model.pt2")
    assert shown.exit_code == 0, shown.output
    for text in (
        "policy default",
        "0  Linear",
        "bfloat16: linear",
        "weights in bfloat16: weight, bias",
    ):
        assert text in shown.stdout
    read = json.loads(precast_("explain", "--exported", "model.pt2", "--json").stdout)
    assert [part["module"] for part in read["modules"]] == ["", "0", "1", "2"]
    Path("p.toml").write_text(
        'base = "default"\n[ops]\nlayer_norm = "fp32"\n[modules]\n"2" = "fp32"\n'
    )
    assert exported("other.pt2", "--policy", "p.toml").exit_code == 0
    assert precast_("explain", "--diff", "model.pt2", "model.pt2").exit_code == 0
    mixed = precast_("explain", "--diff", "model.pt2", "p.toml")
    assert mixed.exit_code == 2
    assert "Name two of a kind" in mixed.stderr
    different = precast_("explain", "--diff", "model.pt2", "other.pt2", "--json")
    assert different.exit_code == 1
    found = {
        (each["module"], each["what"]): (each["first"], each["second"])
        for each in json.loads(different.stdout)["differences"]
    }
    assert found["2", "linear"] == ("bfloat16", "float32")
    assert found["2", "weight 2.weight"] == ("bfloat16", "float32")
    assert not [key for key in found if key[0] == "0"]


def test_a_program_is_compared_from_its_file() -> None:
    done = exported("model.pt2")
    assert "run by PyTorch" in done.stdout
    assert "it gives exactly the model's results on the example." in done.stdout
    report = json.loads(exported("model.pt2", "--json").stdout)
    assert (report["checked"], report["equal"], report["difference"]) == (True, True, None)
    report = json.loads(exported("model.pt2", "--no-check", "--json").stdout)
    assert (report["checked"], report["equal"]) == (False, None)
    assert "results were not compared" in exported("model.pt2", "--no-check").stdout


def test_an_onnx_file_is_compared_as_onnxruntime_runs_it() -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    report = json.loads(exported("model.onnx", "--dtype", "float16", "--json").stdout)
    assert report["checked"] is True
    assert report["runtime"] == f"onnxruntime {onnxruntime.__version__} on the CPU"
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    [found] = session.run(None, {session.get_inputs()[0].name: torch.ones(3, 4).numpy()})
    model, x = sys.modules["shipped_models"].pair()
    with torch.no_grad(), precast.autocast("cpu", torch.float16):
        distances = (model.eval()(x).double() - torch.as_tensor(found).double()).abs()
    largest = distances.max().item()
    assert report["equal"] is (largest == 0)
    if largest:
        assert report["difference"] == f"result 0 differs by up to {largest:.3g}"


def test_an_onnx_file_that_does_not_run_here_is_written_and_not_called_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    done = exported("model.onnx", "--dtype", "bfloat16")
    assert done.exit_code == 0, done.output
    assert "on the CPU cannot run it: NotImplemented" in done.stdout
    assert "Could not find an implementation" in done.stdout
    assert "results were not compared with the model's" in done.stdout
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    done = exported("other.onnx", "--dtype", "float16", "--json")
    report = json.loads(done.stdout)
    assert (report["checked"], report["equal"], report["runtime"]) == (False, None, None)
    assert "pip install onnxruntime" in report["error"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ("--model", "shipped_models:make", "--out", "a.pt2"),
            2,
            "without an example: return both, or pass --example",
        ),
        (("--model", "shipped_models:none", "--out", "a.pt2"), 2, "none"),
        (
            (
                "--model",
                "shipped_models:make",
                "--example",
                "shipped_models:wrong",
                "--out",
                "a.pt2",
            ),
            1,
            "cannot record the model on this example",
        ),
        (
            ("--model", "shipped_models:decides", "--out", "a.pt2"),
            1,
            "control flow depends on data",
        ),
        (
            ("--model", "shipped_models:decides", "--strict", "--out", "a.pt2"),
            1,
            "return x + 1 if x.sum() > 0 else x",
        ),
        (
            ("--model", "shipped_models:pair", "--policy", "cuda.toml", "--out", "a.pt2"),
            1,
            "has rules for cuda and none for cpu, where the model is",
        ),
        (("--model", "shipped_models:pair", "--policy", "none", "--out", "a.pt2"), 2, "none"),
        (("--model", "shipped_models:pair", "--out", "shipped_models.py"), 1, "is not a model"),
        (
            ("--model", "shipped_models:pair", "--out", "shipped_models.py"),
            1,
            "unchanged. Name another file, or move the existing one",
        ),
        (("--model", "shipped_models:pair", "--out", "other.zip"), 1, "is not a model"),
        (("--model", "shipped_models:pair", "--out", "cut.pt2"), 1, "is not a model"),
        (
            ("--model", "shipped_models:pair", "--out", "mine.pt2"),
            1,
            "read-only; an existing file is unchanged. Name another file",
        ),
        (
            ("--model", "shipped_models:pair", "--out", "."),
            1,
            "Name a file in this folder, or another",
        ),
        (("--model", "shipped_models:pair", "--out", "/dev/null"), 1, "a device or a pipe"),
        (
            ("--model", "shipped_models:pair", "--out", "shipped_models.py/a.pt2"),
            1,
            "Name a file in a folder",
        ),
        (("--model", "shipped_models:pair", "--out", "no/a.pt2"), 1, "Create the folder, or name"),
    ],
)
def test_what_is_wrong_is_one_message_and_writes_nothing(
    arguments: tuple[str, ...], code: int, message: str
) -> None:
    Path("cuda.toml").write_text('[ops.cuda]\nlinear = "fp32"\n')
    with zipfile.ZipFile("other.zip", "w") as archive:
        archive.writestr("notes.txt", "mine")
    Path("cut.pt2").write_bytes(b"PK\x03\x04" + bytes(100))
    torch.save({}, "mine.pt2")
    Path("mine.pt2").chmod(0o444)
    before = {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    done = precast_("export", *arguments)
    assert done.exit_code == code, done.output
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before


def test_a_failed_export_leaves_the_file_of_before() -> None:
    assert exported().exit_code == 0
    before = Path("model.pt2").read_bytes()
    done = precast_("export", "--model", "shipped_models:decides", "--out", "model.pt2")
    assert done.exit_code == 1
    assert Path("model.pt2").read_bytes() == before


def test_a_link_leads_to_the_file_that_is_written() -> None:
    Path("versions").mkdir()
    Path("model.pt2").symlink_to("versions/1.pt2")
    assert exported().exit_code == 0
    assert Path("model.pt2").is_symlink()
    assert torch.export.load("versions/1.pt2")
    assert [path.name for path in Path("versions").iterdir()] == ["1.pt2"]


@pytest.mark.parametrize("broken", ["truncated", "text", "missing", "archive"])
def test_a_file_that_cannot_be_read_is_one_message(broken: str) -> None:
    if broken == "truncated":
        exported()
        whole = Path("model.pt2").read_bytes()
        Path("model.pt2").write_bytes(whole[: len(whole) // 2])
    elif broken == "text":
        Path("model.pt2").write_text("no program")
    elif broken == "archive":
        torch.save({"a": 1}, "model.pt2")
    for options in (("--exported", "model.pt2"), ("--diff", "model.pt2", "model.pt2")):
        done = precast_("explain", *options)
        assert done.exit_code == 1
        assert "model.pt2" in done.stderr
        assert "Traceback" not in done.stderr


def test_every_model_can_be_explained_from_its_program() -> None:
    from precast.shipping.exported import export
    from precast.shipping.exported_reading import contents, differences_between

    for made in MODELS.values():
        model, example = made.make().eval(), made.example()
        low = contents(export(model, example, check=False))
        full = contents(export(model, example, dtype=torch.float16, check=False))
        assert differences_between(low, low) == []
        # An LSTM is float32 in both on a processor that has no 16-bit kernel for it.
        assert differences_between(low, full) or low.weight_bytes.keys() == {"float32"}
