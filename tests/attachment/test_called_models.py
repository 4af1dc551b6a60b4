"""Rules for modules under install: they act on the models that are called as if each had been attached."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import precast
from precast import Policy, attach, install
from precast._torch import forward_hooks
from precast.errors import PrecastWarning
from tests.support.installed import uninstall_all

RULES = Policy.load("torch").replace(
    name="rules", modules={"body.0": "fp32", "head": {"dtype": "lower", "ops": {"linear": "fp32"}}}
)


class Model(nn.Module):
    """Notes what its modules gave, as well."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        first = self.body[0](x)
        rest = self.body[2](self.body[1](first))
        last: Tensor = self.head(rest)
        self.seen = [first.dtype, rest.dtype, last.dtype]
        return last


OTHER = Policy.load("torch").replace(name="other", modules={"body.2": "fp32"})
WITH_OTHER = [torch.bfloat16, torch.float32, torch.bfloat16]
WITH_RULES = [torch.float32, torch.bfloat16, torch.float32]
WITHOUT = [torch.bfloat16] * 3


@pytest.fixture(autouse=True)
def _nothing_installed() -> Iterator[None]:
    call = nn.Module.__call__
    yield
    uninstall_all()
    assert nn.Module.__call__ is call


def dtypes(model: nn.Module, called: nn.Module | None = None) -> list[torch.dtype]:
    """What the modules of `model` give when it, or what wraps it, is called in a region of PyTorch's."""
    with torch.autocast("cpu", torch.bfloat16):
        (model if called is None else called)(torch.ones(3, 4))
    seen: list[torch.dtype] = model.seen  # type: ignore[assignment]
    return seen


def test_rules_act_under_install_as_when_attached() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)
    with install(RULES), torch.autocast("cpu", torch.bfloat16):
        found = model(x)
        assert model.seen == WITH_RULES
    assert dtypes(model) == WITHOUT
    with attach(model, RULES, hold=False), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found, model(x))


def test_every_model_that_is_called_is_found_made_before_or_after() -> None:
    before = Model()
    with install(RULES) as installation:
        after = Model()
        assert dtypes(before) == dtypes(after) == WITH_RULES
        assert installation.rules.models == {"Model": 2}
        assert installation.rules.problems == []
    assert not any(forward_hooks(module) for model in (before, after) for module in model.modules())
    assert installation.rules.models == {"Model": 2}


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
    ],
    ids=["DataParallel", "compile", "both"],
)
def test_names_are_those_inside_of_wrappers(wrap: object) -> None:
    torch._dynamo.reset()
    model = Model()
    wrapper = wrap(model)  # type: ignore[operator]
    with install(RULES) as installation:
        assert dtypes(model, wrapper) == WITH_RULES
        assert installation.rules.problems == []


def test_a_part_that_is_called_first_belongs_to_the_whole_that_is_called_later() -> None:
    model = Model()
    with install(RULES) as installation:
        with torch.autocast("cpu", torch.bfloat16):
            assert (
                model.body(torch.ones(1, 4)).dtype is torch.bfloat16
            )  # named "0" in what is called
        assert "[modules] 'body.0' matches no module" in installation.rules.problems[0]
        assert dtypes(model) == WITH_RULES
        with torch.autocast("cpu", torch.bfloat16):
            assert model.head(torch.ones(1, 4)).dtype is torch.float32  # a part, on its own
        assert installation.rules.problems == []


def test_a_model_is_let_go_of() -> None:
    model = Model()
    with install(RULES):
        dtypes(model)
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None


def test_an_attachment_of_the_programs_own_comes_first() -> None:
    before, after = Model(), Model()
    with warnings.catch_warnings(), install(RULES) as installation:
        warnings.simplefilter("ignore", PrecastWarning)
        dtypes(after)
        for model in (before, after):
            with attach(model, OTHER, hold=False):
                assert dtypes(model) == WITH_OTHER
        assert dtypes(after) == WITHOUT  # and what gave way does not come back
        assert len(installation.rules.problems) == 2
        assert all("Model" in problem for problem in installation.rules.problems)


def test_the_same_policy_attached_by_the_program_is_no_conflict() -> None:
    model = Model()
    with install(RULES) as installation, attach(model, RULES, hold=False):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert dtypes(model) == WITH_RULES
        assert installation.rules.models == {"Model": 2}
        assert installation.rules.problems == []


def test_what_cannot_act_is_said_once_and_the_program_goes_on() -> None:
    rules = Policy.load("torch").replace(modules={"0": "fp32"})
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 2)))
    with install(rules) as installation:
        with pytest.warns(PrecastWarning, match="is scripted as a part"):
            scripted(torch.ones(1, 4))
        assert "is scripted as a part" in installation.rules.problems[0]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scripted(torch.ones(1, 4))


def test_rules_that_match_nothing_are_named() -> None:
    with install(Policy.load("torch").replace(modules={"haed": "fp32"})) as installation:
        assert "no model with parameters was called" in installation.rules.problems[0]
        nn.ReLU()(torch.ones(1))
        assert "no model with parameters was called" in installation.rules.problems[0]
        dtypes(Model())
        [problem] = installation.rules.problems
        assert "'haed' matches no module of the model; did you mean head" in problem
        nn.Linear(1, 1)(torch.ones(1))
        [problem] = installation.rules.problems
        assert "Model, Linear" in problem


def test_without_rules_for_modules_nothing_listens() -> None:
    call = nn.Module.__call__
    with install("lean"):
        assert nn.Module.__call__ is call


def test_installations_within_one_another_have_each_its_rules() -> None:
    model = Model()
    with install(RULES):
        assert dtypes(model) == WITH_RULES
        with install(OTHER):
            assert dtypes(model) == WITH_OTHER
        assert dtypes(model) == WITH_RULES
        with install("torch"):
            assert dtypes(model) == WITHOUT
    assert dtypes(model) == WITHOUT


def test_a_model_that_threads_call_at_once_is_found_once() -> None:
    for _ in range(20):
        model = Model()
        wrong: list[object] = []
        start = threading.Barrier(4)

        def call(
            model: Model = model, wrong: list[object] = wrong, start: threading.Barrier = start
        ) -> None:
            start.wait()
            with torch.autocast("cpu", torch.bfloat16):
                given = model(torch.ones(1, 4)).dtype
            if given is not torch.float32:
                wrong.append(given)

        with install(RULES) as installation:
            threads = [threading.Thread(target=call) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert installation.rules.models == {"Model": 2}
        assert not wrong


def test_regions_of_precasts_with_their_own_policy_keep_its_tables() -> None:
    model = Model()
    with install(RULES), precast.autocast("cpu", torch.bfloat16, policy="default"):
        model(torch.ones(3, 4))
        assert model.seen == WITH_RULES


def test_a_rule_without_effect_is_named_where_every_pattern_matches() -> None:
    policy = Policy.load("torch").replace(modules={"out_proj": "fp32"})
    x = torch.ones(3, 1, 4)
    with install(policy) as installation, torch.autocast("cpu", torch.bfloat16):
        nn.MultiheadAttention(4, 1)(x, x, x)
        [problem] = installation.rules.problems
    assert "'out_proj' does nothing for 'out_proj'" in problem
