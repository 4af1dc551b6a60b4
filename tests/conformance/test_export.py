"""torch.export: a region inside a module is written down as PyTorch's is, and one that cannot be is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast import Policy
from tests.conformance.systems import SYSTEMS, TORCH, MakeRegion, System

OTHER = Policy.load("torch").replace(name="other", ops={"linear": "fp32"})
STRICT = pytest.mark.parametrize("strict", [False, True])
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _as_in_a_fresh_process() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Inside(nn.Module):
    """A module that opens regions, one of them in another."""

    def __init__(self, region: MakeRegion) -> None:
        super().__init__()
        self.region = region
        self.layer = nn.Linear(3, 3)
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(9.0).view(3, 3) / 7)
            self.layer.bias.copy_(torch.arange(3.0) / 3)

    def forward(self, x: Tensor) -> Tensor:
        with self.region("cpu", dtype=torch.float16):
            y = self.layer(x)
            with self.region("cpu", enabled=False):
                z = self.layer(x)
            return self.layer(y) + z


class Without(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def exported(module: nn.Module, strict: bool) -> torch.export.ExportedProgram:
    return torch.export.export(module, (torch.ones(2, 3),), strict=strict)


def operations(program: torch.export.ExportedProgram) -> list[str]:
    """Return the nodes of a graph and of the graphs in it."""
    return [
        f"{node.op} {node.target}"
        for graph in program.graph_module.modules()
        if isinstance(graph, torch.fx.GraphModule)
        for node in graph.graph.nodes
    ]


@STRICT
@pytest.mark.parametrize("system", SYSTEMS, ids=str)
def test_a_region_inside_is_in_the_graph_as_pytorchs_is(system: System, strict: bool) -> None:
    def found(each: System) -> tuple[list[str], Tensor]:
        with each() as region:
            program = exported(Inside(region), strict)
        return operations(program), program.module()(torch.ones(2, 3))

    ours, theirs = found(system), found(TORCH)
    assert ours[0] == theirs[0]
    assert any("wrap_with_autocast" in operation for operation in ours[0])
    assert ours[1].dtype is theirs[1].dtype
    assert torch.equal(ours[1], theirs[1])
    with system() as region:
        eager = Inside(region)(torch.ones(2, 3))
    assert torch.equal(ours[1], eager)


@STRICT
@pytest.mark.parametrize("system", SYSTEMS, ids=str)
def test_one_exported_in_a_region_has_its_casts_where_it_runs(system: System, strict: bool) -> None:
    x = torch.ones(2, 3)
    module = Without()
    with system() as region:
        with region("cpu"):
            program = exported(module, strict)
            assert program.module()(x).dtype is torch.bfloat16
            assert torch.equal(program.module()(x), module(x))
        assert program.module()(x).dtype is torch.float32
    with torch.autocast("cpu"):
        assert operations(exported(module, strict)) == operations(program)


@STRICT
@pytest.mark.parametrize("policy", [OTHER, "default"])
def test_a_policy_that_an_exported_program_cannot_say_is_refused(
    policy: Policy | str, strict: bool
) -> None:
    def region(*args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        return precast.autocast(*args, policy=policy, **kwargs)

    with pytest.raises(Exception, match=r'regions of PyTorch\. Use policy="torch"'):
        exported(Inside(region), strict)
    assert not torch.is_autocast_enabled("cpu")
