"""One name for each module and parameter, whatever PyTorch wraps the model in and whoever says the name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel

import precast
from precast._internal.events import NonfiniteOrigin
from precast._internal.records import from_json
from precast.policy.module_names import (
    modules_by_name,
    name_of_each,
    named_parameters,
    names_in,
    unwrapped,
)
from precast.policy.module_plan import plan
from precast.report.numbers import module_of
from precast.report.saved_trace import data_of
from precast.report.tree import tree

SOURCES = Path(precast.__file__).parent

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="PyTorch is built without gloo"
)

MODULES = ["first", "module", "head", "normed"]
PARAMETERS = {
    *("first.weight", "first.bias", "module.weight", "module.bias"),
    *("head.weight", "head.bias"),
    *("normed.weight_original0", "normed.weight_original1", "normed.bias"),
}


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Network(nn.Module):
    """One child is really called `module`, one has a parametrized weight, one a weight made of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.module = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head, self.normed = nn.Linear(4, 4), nn.Linear(4, 4)
        parametrize.register_parametrization(self.head, "weight", Doubled())
        parametrizations.weight_norm(self.normed)

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(self.head(self.module(self.first(x))))  # type: ignore[no-any-return]


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def sharded_before(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda model: model,
    "DataParallel": nn.DataParallel,
    "DDP": DistributedDataParallel,
    "AveragedModel": AveragedModel,
    "compile": compiled,
    "checkpoint": checkpoint_wrapper,
    "FSDP2": sharded,
    "compile of DDP": lambda model: compiled(DistributedDataParallel(model)),
    "DDP of compile": lambda model: DistributedDataParallel(compiled(model)),
    "compile of FSDP2": lambda model: compiled(sharded(model)),
}


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _runs_eagerly() -> Iterator[None]:
    """What is compiled keeps its wrapper and its names, and hooks see every call."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture(params=WRAPPERS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return WRAPPERS[request.param](Network())


def take(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    """One training step with a gradient of `module.weight` that is infinite."""
    scaler.scale(model(torch.randn(2, 4)).square().mean()).backward()
    [bad] = [p for name, p in named_parameters(model) if name == "module.weight"]
    assert bad.grad is not None
    bad.grad.fill_(torch.inf)
    scaler.step(optimizer)


# --- the names ---


def test_the_names_are_those_of_the_program(model: nn.Module) -> None:
    assert set(MODULES) | {""} <= set(modules_by_name(model))
    assert not [name for name in modules_by_name(model) if re.search(r"_\w+ed|_orig", name)]
    assert {name for name, _ in named_parameters(model)} == PARAMETERS
    assert len(list(model.parameters())) == len(PARAMETERS)
    assert sorted(names_in(model, model.parameters()).values()) == sorted(PARAMETERS)
    assert isinstance(modules_by_name(model)[""], Network)
    assert isinstance(unwrapped(model), Network)
    named = name_of_each(model)
    assert len({id(module) for _, module in named}) == len(named)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*:FutureWarning")
def test_names_under_the_first_fsdp() -> None:
    """It keeps the parameters of one module as views of one tensor, and takes their names from the modules."""
    wrapped = sharded_before(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert list(modules_by_name(wrapped)) == ["", "0", "1"]
    names = {name for name, _ in named_parameters(wrapped)}
    assert names >= {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_no_two_parameters_share_a_name() -> None:
    class Wrapper(nn.DataParallel):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            self.scale = nn.Parameter(torch.ones(()))

    class Scaled(Network):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    names = [name for name, _ in named_parameters(Wrapper(Scaled()))]
    assert len(set(names)) == len(names)
    assert {"scale", "module.scale"} <= set(names)


def test_names_between_wrappers_inside_the_model() -> None:
    model = nn.Sequential(compiled(Network()), DistributedDataParallel(Network()))
    assert {name for name, _ in named_parameters(model)} == {
        f"{place}.{name}" for place in (0, 1) for name in PARAMETERS
    }


def test_nothing_else_names_what_is_in_a_model() -> None:
    """In the package, PyTorch's own names are asked for in one file; one module's own parameters anywhere."""
    own = SOURCES / "policy" / "module_names.py"
    cleaning = re.compile(
        r"named_modules\(remove_duplicate|model\.named_(parameters|modules)\(|_orig_mod|"
        r"_fsdp_wrapped_module|removeprefix\(\"module\.|\.parametrizations"
    )
    found = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        if path != own and cleaning.search(path.read_text(encoding="utf-8"))
    }
    assert not found


# --- all who say them ---


def test_a_plan_says_them(model: nn.Module) -> None:
    policy = precast.Policy.load("torch").replace(modules={"module": "fp32", "a.*.module": "fp32"})
    found = plan(model, policy)
    assert [m.name for m in found.modules if m.applied_rule] == ["module"]
    assert found.unmatched == ("a.*.module",)


def test_an_attachment_says_them(model: nn.Module) -> None:
    with precast.attach(model) as attachment:
        assert {*attachment._held_parameters, *attachment.left_alone} == PARAMETERS


def test_a_trace_and_its_report_say_them(model: nn.Module) -> None:
    with precast.trace(model) as trace, precast.autocast("cpu"):
        model(torch.ones(2, 4))
    ran = {row.module for row in trace.rows} - {None, ""}
    assert {"first", "module", "head", "normed"} <= ran
    inside = {name for name in modules_by_name(model) if ".parametrizations" in name}
    assert ran <= {*MODULES, *inside}
    assert set(MODULES) <= {node.name for node in tree(data_of(trace))}


def test_a_monitor_a_scaler_and_the_report_say_them(model: nn.Module) -> None:
    if isinstance(model, AveragedModel):
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = precast.GradScaler("cpu", init_scale=2.0)
    with precast.attach(model), precast.monitor(model) as monitor:
        take(model, optimizer, scaler)
        event = scaler.last_step(optimizer)
        assert event is not None
        # Of a sharded parameter it says whose part is bad.
        assert [name.removeprefix("rank 0: ") for name in event.names] == ["module.weight"]
        scaler.update()
    seen = {(each["kind"], each["name"]) for each in monitor.to_dict()["modules"]}
    assert {name for kind, name in seen if kind == "parameter"} == PARAMETERS
    assert set(MODULES) <= {name for kind, name in seen if kind == "output"}
    first = from_json(NonfiniteOrigin, monitor.to_dict()["first"])
    assert (first.name, module_of(first)) == ("module.weight", "module")
