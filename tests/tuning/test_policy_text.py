"""Under the policy of a choice every site runs in the dtype that the choice gives it, as a trace sees it."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from precast.errors import PolicyError
from precast.policy.module_rules import decide
from precast.policy.policy import Policy, Rule
from precast.policy.rows import canonical
from precast.tuning.fewest_rows import Row, fewest_rows, will_do
from precast.tuning.policy_text import _policy, policy_of, text_of, written_rows
from precast.tuning.sites import Choice, Edge, Program, Site
from tests.tuning.programs import programs
from tests.tuning.traced import assert_runs_as_chosen

F32, LOW = torch.float32, torch.bfloat16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def _step(model):
    torch.manual_seed(0)
    return F.cross_entropy(model(torch.randn(2, 8)), torch.tensor([0, 1]))


UP, RELU, ADD = (
    Site("body.up", "linear", rule=Rule.LOWER),
    Site("body", "relu"),
    Site("body", "add"),
)
NORM, TANH = Site("body.norm", "native_layer_norm"), Site("", "tanh")
HEAD = Site("head", "linear", rule=Rule.LOWER)
LOSS = Site(None, "cross_entropy_loss", rule=Rule.FP32)
PROGRAM = Program(
    sites=(UP, RELU, ADD, NORM, TANH, HEAD, LOSS),
    edges=(
        Edge(None, UP, 16, dtype=F32),
        Edge(None, UP, 64, dtype=F32, weight="body.up.weight"),
        Edge(UP, RELU, 16),
        Edge(None, ADD, 16, dtype=F32),
        Edge(RELU, ADD, 16),
        Edge(ADD, NORM, 16),
        Edge(None, NORM, 8, dtype=F32, weight="body.norm.weight", decides=False),
        Edge(NORM, TANH, 16),
        Edge(TANH, HEAD, 16),
        Edge(HEAD, LOSS, 8),
    ),
    modules=("", "body", "body.up", "body.norm", "head"),
)
low_sites = st.sets(st.sampled_from(PROGRAM.sites))


@pytest.mark.parametrize("base", ["default", "torch"])
@settings(max_examples=6, deadline=None)
@given(low=low_sites)
def test_each_site_runs_as_chosen(base, low):
    choice = PROGRAM.choose(low)
    policy = policy_of(choice, PROGRAM, Policy.load(base))
    assert_runs_as_chosen(Model(), _step, policy, choice, PROGRAM)


def test_the_loss_has_its_row_for_the_device_alone():
    policy = policy_of(PROGRAM.choose([LOSS]), PROGRAM, Policy.load("default"))
    assert policy.resolve("cross_entropy_loss", "cpu").rule is Rule.LOWER
    assert policy.entries("cuda") == Policy.load("default").entries("cuda")


def test_a_choice_that_no_policy_can_carry_out_is_an_error():
    stuck = Site("", "relu", casts_down=False)
    program = Program((stuck,), (Edge(None, stuck, 8, dtype=F32),))
    with pytest.raises(PolicyError, match=r"the model: relu.*settle"):
        policy_of({stuck: LOW}, program, Policy.load("default"))


def test_the_error_counts_the_sites():
    with pytest.raises(PolicyError, match=r"body\.up: linear and 6 other sites"):
        policy_of({}, PROGRAM, Policy.load("default"))


# --- the shortest file ---

NOTHING = Policy("nothing", {})


def _says(policy: Policy, site: Site) -> tuple[Rule | None, bool]:
    """The row that decides for a site, and whether its module has a row of its own."""
    key = canonical(site.op)
    outside = policy.entries("cpu").get(key)
    if site.module is None:
        return (outside.rule if outside else None), True
    inside = policy.inside(site.module).ops.get(key, outside)
    matching = policy.patterns.matching(site.module)
    decided = decide(matching, policy.modules, site.module)
    return (inside.rule if inside else None), decided is not None and key in decided[1].ops


def _all_run_as_chosen(policy: Policy, choice: Choice, program: Program) -> bool:
    said = {site: _says(policy, site) for site in program.sites}
    with_rows = {site.op for site, (row, _) in said.items() if row is not None}
    return all(
        will_do(site, row, choice, program)
        and (is_own or not site.pinned or site.op not in with_rows)
        for site, (row, is_own) in said.items()
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_shortest_rows_do_and_none_can_be_left_out(data):
    program = data.draw(programs())
    choice = program.choose(data.draw(st.sets(st.sampled_from(program.sites))))
    rows = written_rows(choice, program, NOTHING)
    assert _all_run_as_chosen(_policy(rows, program, NOTHING), choice, program)
    for i in range(len(rows)):
        fewer = _policy([*rows[:i], *rows[i + 1 :]], program, NOTHING)
        assert not _all_run_as_chosen(fewer, choice, program), rows[i]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_no_other_rows_are_fewer(data):
    """Among all ways to give each place a row, for a single operation of few modules."""
    places = [None, "", "a", "a.0", "b"]
    chosen = data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=4, unique=True))
    sites = tuple(
        Site(place, "linear", rule=data.draw(st.sampled_from([None, Rule.LOWER, Rule.FP32])))
        for place in chosen
    )
    edges = tuple(
        Edge(None, site, 10, dtype=data.draw(st.sampled_from([F32, LOW]))) for site in sites
    )
    program = Program(sites, edges, LOW, "cpu", ("", "a", "a.0", "b"))
    choice = program.choose(data.draw(st.sets(st.sampled_from(sites))))
    found = fewest_rows(choice, program)
    for rules in itertools.product((None, Rule.KEEP, Rule.FP32, Rule.LOWER), repeat=len(places)):
        rows = [Row(p, "linear", r, ()) for p, r in zip(places, rules, strict=True) if r]
        if len(rows) < len(found):
            assert not _all_run_as_chosen(_policy(rows, program, NOTHING), choice, program), rows


@settings(max_examples=6, deadline=None)
@given(low=low_sites)
def test_the_shortest_file_runs_each_site_as_chosen(low, tmp_path_factory):
    choice = PROGRAM.choose(low)
    path = tmp_path_factory.mktemp("tuned") / "tuned.toml"
    path.write_text(text_of(choice, PROGRAM, "default", reason=lambda row: f"{row.op} so"))
    assert_runs_as_chosen(Model(), _step, Policy.load(path), choice, PROGRAM)


def test_what_the_base_does_already_is_not_written():
    program = Program((UP, HEAD), (Edge(None, UP, 1, dtype=F32), Edge(None, HEAD, 1, dtype=F32)))
    assert written_rows(program.choose([UP, HEAD]), program, NOTHING) == []
    text = text_of(program.choose([UP, HEAD]), program, "default")
    assert text == 'name = "tuned"\nbase = "default"\n'


def test_one_row_of_the_device_stands_for_all_modules():
    sites = tuple(Site(f"layers.{i}", "softmax") for i in range(3))
    edges = tuple(Edge(None, site, 1, dtype=LOW) for site in sites)
    names = ("", "layers", *(site.module for site in sites))
    program = Program(sites, edges, modules=names)
    [row] = written_rows(program.choose(), program, NOTHING)
    assert row == Row("layers", "softmax", Rule.FP32, sites)


def test_what_no_module_runs_needs_no_row_of_its_own():
    outside, inside = Site(None, "relu", pinned=True), Site("a", "relu", rule=Rule.LOWER)
    edges = (Edge(None, outside, 1, dtype=F32), Edge(None, inside, 1, dtype=F32))
    program = Program((outside, inside), edges, modules=("", "a"))
    rows = written_rows(program.choose(), program, NOTHING)
    assert rows == [Row("a", "relu", Rule.KEEP, (inside,))]


def test_modules_that_say_the_same_share_a_pattern():
    norms = tuple(Site(f"layers.{i}.norm", "mul") for i in range(3))
    others = tuple(Site(f"layers.{i}.mlp", "mul") for i in range(3))
    edges = tuple(Edge(None, site, 1, dtype=LOW) for site in (*norms, *others))
    names = ("", "layers", *(f"layers.{i}{end}" for i in range(3) for end in ("", ".norm", ".mlp")))
    odd = Site("", "mul")
    program = Program(
        (odd, *norms, *others), (Edge(None, odd, 1, dtype=LOW), *edges), modules=names
    )
    choice = program.choose([odd, *others])
    assert written_rows(choice, program, NOTHING) == [Row("layers.*.norm", "mul", Rule.FP32, norms)]


def test_a_file_has_its_header_and_a_reason_on_each_line():
    choice = PROGRAM.choose(PROGRAM.sites)
    text = text_of(
        choice,
        PROGRAM,
        "default",
        reason=lambda row: f"{len(row.sites)} sites",
        header=["seed 3", "on\na box"],
    )
    lines = text.splitlines()
    assert lines[:5] == ["# seed 3", "# on", "# a box", 'name = "tuned"', 'base = "default"']
    rows = [line for line in lines[5:] if line and not line.startswith("[")]
    assert rows
    assert all(line.count("reason") == line.count("rule") > 0 for line in rows)


def test_a_base_with_rules_for_modules_is_refused():
    base = Policy.load("default").replace(modules={"head": "fp32"})
    with pytest.raises(PolicyError, match="has rules for modules"):
        policy_of(PROGRAM.choose(), PROGRAM, base)
