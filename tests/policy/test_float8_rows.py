"""Float8 rules in a policy: by operation and by module, read, written, and refused where there is no kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import precast
from precast.errors import PolicyError
from precast.policy.module_plan import plan
from precast.policy.module_rules import ModuleRule, parse_module_rule
from precast.policy.policy import Policy, Rule
from precast.policy.rows import FLOAT8_OPERATIONS, FLOAT8_RULES, Entry

DEFAULT = Policy.load("default")
rules = pytest.mark.parametrize("rule", FLOAT8_RULES)


@rules
def test_a_row_is_read_from_a_file_and_written_back(rule: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        f'base = "default"\n[ops]\nlinear = "{rule}"\n[ops.cuda]\nmm = {{ rule = "{rule}", reason = "why" }}\n'
    )
    read = Policy.load(path)
    assert read.resolve("linear", "cpu").rule is Rule(rule)
    assert read.resolve("mm.default", "cpu").rule is Rule.LOWER
    assert read.resolve("mm.default", "cuda").reason.startswith("why")
    again = tmp_path / "again.toml"
    read.save(again)
    assert Policy.load(again) == read
    assert read.fingerprint != DEFAULT.fingerprint


@pytest.mark.parametrize("op", ["bmm", "softmax", "conv2d", "baddbmm", "mm.dtype"])
def test_an_operation_without_a_kernel_is_refused(op: str) -> None:
    with pytest.raises(
        PolicyError, match=r"cannot be 'float8'.*Allowed: addmm, linear, matmul, mm"
    ):
        DEFAULT.replace(ops={op: "float8"})


@rules
def test_a_module_rule_is_a_row_for_each_product(rule: str) -> None:
    found = parse_module_rule(rule, "here")
    assert found.dtype is None
    assert {k: e.rule for k, e in found.ops.items()} == dict.fromkeys(FLOAT8_OPERATIONS, rule)
    assert str(found) == rule
    assert found.agrees_with(parse_module_rule({"dtype": rule, "reason": "new"}, "there"))


def test_a_module_rule_may_have_rows_beside_it() -> None:
    found = parse_module_rule({"dtype": "float8", "ops": {"mm": "lower", "softmax": "fp32"}}, "")
    assert found.ops["aten::mm"].rule is Rule.LOWER
    assert found.ops["aten::linear"].rule is Rule.FLOAT8
    assert found.ops["aten::softmax"].rule is Rule.FP32


@pytest.mark.parametrize(
    "said",
    [
        "float8_rowwise",
        {"dtype": "float8", "reason": "large"},
        {"dtype": "float8", "ops": {"mm": "lower"}},
        {"dtype": "float8_pow2", "ops": {"mm": {"rule": "float8_pow2", "reason": "mine"}}},
        {"dtype": "float8_hp_grad", "ops": {"softmax": "fp32"}, "reason": "both"},
        {"dtype": "bfloat16", "ops": {"linear": "float8"}},
    ],
)
def test_module_rules_are_written_and_read_back(said: object, tmp_path: Path) -> None:
    policy = DEFAULT.replace(modules={"decoder.**.mlp.*": said})
    policy.save(tmp_path / "mine.toml")
    text = policy.text
    assert Policy.load(tmp_path / "mine.toml") == policy
    if said == "float8_rowwise":
        assert '"decoder.**.mlp.*" = "float8_rowwise"' in text


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(PolicyError, match="did you mean float8_rowwise"):
        DEFAULT.replace(modules={"mlp": "float8_rowise"})
    with pytest.raises(PolicyError, match="is not a precision of a module"):
        ModuleRule("float8")  # type: ignore[arg-type]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 32), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(self.attention(x))
        return out


@pytest.mark.filterwarnings("ignore:float8 is emulated")
def test_an_attached_model_runs_the_named_modules_in_8_bits() -> None:
    model = Block()
    policy = DEFAULT.replace(modules={"mlp.*": "float8_rowwise"})
    with precast.attach(model, policy, hold=False):
        with precast.autocast("cpu", torch.bfloat16), precast.trace() as trace:
            model(torch.randn(4, 16))
    found = {row.module: row.rule for row in trace.rows if row.op == "linear"}
    assert found == {"attention": "lower", "mlp.0": "float8_rowwise"}


def test_resolve_and_plan_speak_of_the_rule() -> None:
    policy = DEFAULT.replace(modules={"mlp.*": "float8", "mlp": "fp32"})
    assert policy.resolve("linear", "cpu", module="mlp.0").rule is Rule.KEEP
    complaints = plan(Block(), policy).complaints()
    assert any("'mlp.*' does nothing for 'mlp.0'" in said for said in complaints)
    inside = DEFAULT.replace(modules={"mlp.*": "float8"})
    assert inside.resolve("linear", "cpu", module="mlp.0").rule is Rule.FLOAT8
    assert plan(Block(), inside).complaints() == []
    nothing = DEFAULT.replace(modules={"mpl.*": "float8"})
    assert "'mpl.*' matches no module" in plan(Block(), nothing).complaints()[0]


def test_only_a_policy_with_such_rows_shows_their_columns() -> None:
    assert "float8" not in DEFAULT._repr_html_()
    assert "float8" in DEFAULT.replace(ops={"linear": "float8"})._repr_html_()
    assert Entry(Rule.FLOAT8).reason == "matrices are multiplied in 8 bits, with one scale a matrix"


@pytest.mark.parametrize("said", ["lower", "bfloat16", "float16", {"dtype": "lower"}])
@pytest.mark.parametrize("by", ["operation", "module"])
def test_a_module_in_16_bits_is_not_in_8(said: object, by: str) -> None:
    rules = {"ops": {"linear": "float8"}} if by == "operation" else {"modules": {"": "float8"}}
    policy = DEFAULT.replace(**rules)  # type: ignore[arg-type]
    policy = policy.replace(modules={"mlp.0": said})
    assert policy.resolve("linear", "cpu", module="attention").rule is Rule.FLOAT8
    assert policy.resolve("linear", "cpu", module="mlp.0").rule is Rule.LOWER
    planned = plan(Block(), policy)
    assert planned.inside("mlp.0").ops["aten::linear"].rule is Rule.LOWER
    assert dict(planned.rules)["mlp.0"].startswith(str(parse_module_rule(said, "")))


def test_a_module_in_16_bits_keeps_the_rows_that_it_names_and_those_that_are_not_in_8_bits() -> (
    None
):
    policy = DEFAULT.replace(
        ops={"linear": "float8", "mm.default": "fp32"},
        modules={"mlp": {"dtype": "bfloat16", "ops": {"linear": "float8_rowwise"}}},
    )
    assert policy.resolve("linear", "cpu", module="mlp.0").rule is Rule.FLOAT8_ROWWISE
    assert policy.resolve("mm.default", "cpu", module="mlp.0").rule is Rule.FP32


@pytest.mark.filterwarnings("ignore:float8 is emulated")
def test_an_attached_model_runs_such_a_module_in_16_bits() -> None:
    model = Block()
    policy = DEFAULT.replace(ops={"linear": "float8"}, modules={"mlp.0": "bfloat16"})
    with precast.attach(model, policy), precast.trace() as trace:
        with precast.autocast("cpu", torch.bfloat16):
            model(torch.randn(4, 16))
    found = {row.module: row.rule for row in trace.rows if row.op == "linear"}
    assert found == {"attention": "float8", "mlp.0": "lower"}
