"""precast explain: the tree of a plan, one operation, exit codes, and one message for each thing asked wrongly."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console
from torch import nn

import precast
from precast import Policy
from precast.cli.main import main
from precast.cli.python_objects import load_model
from precast.diagnostics.explain.model import explain_model

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.Linear(30, 40)
        self.norm = nn.LayerNorm(30)

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 30)
        self.layers = nn.ModuleList(Block() for _ in range(12))
        self.lm_head = nn.Linear(30, 1000)

class Zoo:
    @staticmethod
    def build():
        return Decoder()

def fails():
    raise RuntimeError("no weights here")

def text():
    return "a model"

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(8, 8, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 2)
        self.idle = nn.Linear(8, 2)

    def forward(self, x, factor=1.0):
        x = self.gru(self.rnn(x)[0])[0]
        return self.head(self.drop(self.attention(x, x, x)[0])) * factor

def inputs():
    return torch.randn(2, 3, 8)

ready = inputs()
several = (ready, 2.0)
named = {"x": ready, "factor": 2.0}
too_wide = torch.ones(2, 3, 9)

built = nn.Linear(2, 2)
three = 3
"""

POLICY = """
name = "careful"
base = "torch"
[modules]
"**.lm_head" = { dtype = "fp32", reason = "the logits of a large vocabulary need float32's range" }
"layers.*.attn" = "bfloat16"
"layers.3.norm" = { dtype = "lower", ops = { layer_norm = "lower" } }
"layers.0.attn" = "keep"
"embd" = "fp32"
"encoder.**" = "fp32"
"""

TREE = """\
Decoder with the policy 'careful'

model Decoder
├── embed Embedding
├── layers ModuleList
│   ├── 0 Block
│   │   ├── attn Linear keep by 'layers.0.attn'
│   │   └── norm LayerNorm
│   ├── 1-2 Block
│   │   ├── attn Linear bfloat16 by 'layers.*.attn'
│   │   └── norm LayerNorm
│   ├── 3 Block
│   │   ├── attn Linear bfloat16 by 'layers.*.attn'
│   │   └── norm LayerNorm the region's dtype with layer_norm = lower by
│   │       'layers.3.norm'
│   └── 4-11 Block
│       ├── attn Linear bfloat16 by 'layers.*.attn'
│       └── norm LayerNorm
└── lm_head Linear fp32 by '**.lm_head': the logits of a large vocabulary need
    float32's range

'**.lm_head' matches 1 module: lm_head
'layers.*.attn' matches 12 modules: layers.0.attn, layers.1.attn, layers.2.attn,
layers.3.attn and 8 more
'layers.3.norm' matches 1 module: layers.3.norm
'layers.0.attn' matches 1 module: layers.0.attn

Warning: [modules] 'embd' matches no module of the model; did you mean embed?
Warning: [modules] 'encoder.**' matches no module of the model.
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zoo_of_models.py").write_text(MODEL)
    (tmp_path / "careful.toml").write_text(POLICY)
    (tmp_path / "broken_module.py").write_text("import no_such_package_of_mine\n")
    (tmp_path / "wrong_module.py").write_text("1 / 0\n")
    path = list(sys.path)
    yield
    assert sys.path == path
    for name in ("zoo_of_models", "broken_module", "wrong_module"):
        sys.modules.pop(name, None)


def explain(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments])


def plain(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def test_a_plan_is_a_tree() -> None:
    result = explain("--model", "zoo_of_models:Decoder", "--policy", "careful.toml")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert plain(result.stdout) == TREE
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_plan_as_json_has_every_module() -> None:
    result = explain("--model", "zoo_of_models:Decoder", "--policy", "careful.toml", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["policy"] == "careful"
    assert found["unmatched"] == ["embd", "encoder.**"]
    modules = {module["name"]: module for module in found["modules"]}
    assert len(modules) == len(found["modules"]) == 40
    assert modules["layers.11.attn"] == {
        "name": "layers.11.attn",
        "type": "Linear",
        "precision": "bfloat16",
        "ops": {},
        "pattern": "layers.*.attn",
        "rule": "bfloat16",
        "reason": "",
    }
    assert modules["layers.3.norm"]["ops"] == {"aten::layer_norm": "lower"}
    assert modules["lm_head"]["precision"] == "fp32"
    assert modules[""]["pattern"] is None


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("zoo_of_models:Decoder", "Decoder"),
        ("zoo_of_models:Zoo.build", "Decoder"),
        ("zoo_of_models:built", "Linear"),
        ("torch.nn:Identity", "Identity"),
    ],
)
def test_a_model_is_made_by_a_function_a_class_or_is_there(model: str, kind: str) -> None:
    assert type(load_model(model)).__name__ == kind
    assert explain("--model", model).exit_code == 0


WRONG = {
    "no colon": ("zoo_of_models", 2, "expected MODULE:FACTORY"),
    "no factory": ("zoo_of_models:", 2, "expected MODULE:FACTORY"),
    "no such module": ("zoo_of_modls:x", 2, "no module named 'zoo_of_modls'"),
    "no such part of a package": ("torch.nn.modls:x", 2, "no module named 'torch.nn.modls'"),
    "no such name": ("zoo_of_models:Decodr", 2, "zoo_of_models has no attribute 'Decodr'"),
    "not callable": (
        "zoo_of_models:three",
        2,
        "zoo_of_models:three: expected a function that returns a model, got int",
    ),
    "a factory that raises": ("zoo_of_models:fails", 1, "failed: RuntimeError: no weights here"),
    "not a model": ("zoo_of_models:text", 1, "expected a torch.nn.Module, got str"),
    "a module that needs another": ("broken_module:x", 1, "No module named 'no_such_package_of_"),
    "a module that raises": ("wrong_module:x", 1, "importing wrong_module failed: ZeroDivision"),
}


@pytest.mark.parametrize(("model", "code", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_model_that_cannot_be_made_is_one_message(model: str, code: int, message: str) -> None:
    result = explain("--model", model)
    assert result.exit_code == code
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_plan_that_cannot_be_carried_out_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text('[modules]\n"x.*.attn" = "fp32"\n"**.attn" = "lower"\n')
    (tmp_path / "q.toml").write_text('[modules]\n"layers.*.attn" = "fp32"\n"**.attn" = "lower"\n')
    assert explain("--model", "zoo_of_models:Decoder", "--policy", "p.toml").exit_code == 0
    result = explain("--model", "zoo_of_models:Decoder", "--policy", "q.toml")
    assert result.exit_code == 2
    assert "'layers.*.attn' says fp32, '**.attn' says lower" in result.stderr


# --- operations ---


SOFTMAX = """\
softmax on cpu: keep
  no row for softmax on cpu in the policy 'lean': runs as it does outside a
  region
softmax on cuda: fp32_set_dtype
  computed in float32 through the operation's own dtype argument (torch.toml:
  [ops.cuda] softmax)
"""

BMM = """\
bmm.default on cpu: lower
  arguments are cast to the region's dtype (torch.toml: [ops.cpu] bmm.default)
bmm.dtype on cpu: keep
  no row for bmm.dtype on cpu in the policy 'default': runs as it does outside a
  region
"""

BANNED = """\
binary_cross_entropy on cuda: banned
  a probability that 16 bits round to 0 or 1 gives an infinite loss: use
  binary_cross_entropy_with_logits (torch.toml: [ops.cuda] binary_cross_entropy)
"""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("softmax", "--policy", "lean"), SOFTMAX),
        (("bmm", "--device", "cpu"), BMM),
        (("binary_cross_entropy", "--policy", "torch", "--device", "cuda"), BANNED),
    ],
)
def test_all_about_an_operation_fits_80_columns(arguments: tuple[str, ...], text: str) -> None:
    result = explain(*arguments)
    assert plain(result.stdout) == text
    assert max(map(len, text.splitlines())) <= 80


def test_an_operation_in_a_module() -> None:
    asked = ("linear", "--device", "cpu", "--module", "lm_head", "--policy", "careful.toml")
    assert explain(*asked).stdout.startswith("linear on cpu in 'lm_head': keep\n")
    found = json.loads(explain(*asked, "--json").stdout)
    assert found["policy"] == "careful"
    assert found["module"] == "lm_head"
    assert found["devices"]["cpu"]["linear"]["rule"] == "keep"
    assert "'**.lm_head' for 'lm_head'" in found["devices"]["cpu"]["linear"]["reason"]


@pytest.mark.parametrize(
    ("asked", "code", "message"),
    [
        ((), 2, "Name an operation"),
        (("softmax", "--model", "zoo_of_models:Decoder"), 2, "Name an operation"),
        (("--model", "zoo_of_models:Decoder", "--device", "cpu"), 2, "go with an operation"),
        (("softmaxx",), 2, "no operation aten::softmaxx; did you mean softmax"),
        (("softmax", "--device", "gpu"), 2, "'gpu' is not a device type"),
        (("softmax", "--policy", "no.toml"), 2, "no policy 'no.toml'"),
    ],
)
def test_what_cannot_be_explained_is_one_message(
    asked: tuple[str, ...], code: int, message: str
) -> None:
    result = explain(*asked)
    assert result.exit_code == code
    assert result.stdout == ""
    assert message in result.stderr


def test_each_device_type_is_allowed_once() -> None:
    with pytest.raises(precast.errors.RegionError) as caught:
        precast.autocast("cuba")
    assert str(caught.value).count("privateuseone") == 1


# --- an example ---


EXAMPLE = ("--model", "zoo_of_models:Mixed", "--example")


def ran(example: str, *more: str) -> dict[str, dict[str, list[str]]]:
    """What the modules ran, by name, as the command says it in JSON."""
    result = explain(*EXAMPLE, f"zoo_of_models:{example}", "--json", *more)
    assert result.exit_code == 0, result.output
    return {module["name"]: module["ran"] for module in json.loads(result.stdout)["modules"]}


@pytest.mark.parametrize("example", ["inputs", "ready", "several", "named"])
def test_an_example_says_what_each_module_ran_also_recurrent_ones_and_attention(
    example: str,
) -> None:
    found = ran(example, "--policy", "torch")
    for name in ("rnn", "gru", "attention", "head"):
        assert found[name].get("bfloat16"), name
    assert found["head"] == {"bfloat16": ["linear"]}
    assert found["idle"] == {}


def test_an_example_follows_the_rules_of_the_modules(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(
        'base = "torch"\n[modules]\nrnn = "fp32"\nhead = "float16"\n'
    )
    found = ran("inputs", "--policy", "rules.toml")
    assert set(found["rnn"]) == {"float32"}
    assert set(found["head"]) == {"float16"}
    assert "bfloat16" in found["gru"]


def test_the_tree_says_what_ran_and_what_did_not() -> None:
    result = explain(*EXAMPLE, "zoo_of_models:inputs")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "by the dtype of their results" in text
    assert "head Linear (linear in bfloat16)" in text


def test_blocks_that_ran_alike_are_one_line() -> None:
    blocks = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)]
    report = explain_model(nn.Sequential(*blocks), Policy.load("default"), torch.randn(2, 3, 8))
    console = Console(width=200)
    with console.capture() as printed:
        console.print(report.render())
    assert "0-2 TransformerEncoderLayer" in printed.get()
    assert report.ran is not None
    assert "linear" in report.ran["1.self_attn"]["bfloat16"]


def test_an_example_leaves_the_model_and_the_random_numbers_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    model[2].eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    example = torch.randn(3, 4, requires_grad=True)
    drawn, fused = torch.get_rng_state(), torch.backends.mha.get_fastpath_enabled()
    report = explain_model(model, Policy.load("default"), example)
    assert report.ran is not None
    assert report.ran["0"] == {"bfloat16": ["linear"]}
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.backends.mha.get_fastpath_enabled() == fused
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert example.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((*EXAMPLE, "zoo_of_models:too_wide"), 1, "the model failed on the example: "),
        ((*EXAMPLE, "zoo_of_models:nothing"), 2, "zoo_of_models has no attribute 'nothing'"),
        ((*EXAMPLE, "inputs"), 2, "expected MODULE:NAME, as in my_package.models:example"),
        ((*EXAMPLE, "zoo_of_models:fails"), 1, "zoo_of_models:fails() failed"),
        (("softmax", "--example", "zoo_of_models:inputs"), 2, "it goes with --model"),
    ],
)
def test_an_example_that_is_not_there_or_fails_is_named(
    arguments: tuple[str, ...], code: int, message: str
) -> None:
    result = explain(*arguments)
    assert result.exit_code == code
    assert message in " ".join(result.stderr.split())
    assert not torch.is_autocast_enabled("cpu")
