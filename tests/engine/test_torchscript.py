"""TorchScript modules run on the policy in force, not on TorchScript's own autocast pass.

Under PyTorch's own policy they run as in PyTorch: tests/conformance/test_torchscript.py.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import precast
from precast import Policy, _torch
from precast.engine import registration
from precast.weights.unversioned_writes import USES_BETWEEN_CHECKS
from tests.conformance.test_torchscript import WAYS, fresh

# TorchScript is deprecated, and programs still use it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

KEEP = Policy.load("torch").replace(
    name="keep", ops={"linear": "fp32", "matmul": "fp32", "addmm": "fp32", "mm": "fp32"}
)
LOWER = Policy.load("torch").replace(
    name="lower", ops={"relu": "fp32", "gelu": "lower", "cat": "lower", "mse_loss": "lower"}
)


@contextmanager
def _installed(policy: Policy) -> Iterator[None]:
    with precast.install(policy), torch.autocast("cpu"):
        yield


REGIONS: dict[str, Callable[[Policy], Any]] = {
    "region": lambda policy: precast.autocast("cpu", policy=policy),
    "installed": _installed,
}


def scripted() -> tuple[torch.nn.Module, torch.jit.ScriptModule]:
    """A module and its scripted self; its class is its own, for scripted instances of one class share their graphs.

    For the same reason it has no submodules: a scripted `nn.Linear` may have run in a torch region in another test.
    """

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Parameter(torch.randn(4, 4))
            self.second = torch.nn.Parameter(torch.randn(4, 4))
            self.bias = torch.nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.relu(F.linear(x, self.first, self.bias)), self.second)

    net = Net()
    return net, torch.jit.script(net)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way)
        for name in ("Straight", "Typed")
        for way in ("scripted", "traced", "frozen", "loaded")
    ]
    + [("Branching", "scripted")],
)
@pytest.mark.parametrize("policy", [KEEP, LOWER], ids=lambda p: p.name)
@pytest.mark.parametrize("where", REGIONS)
def test_modules_of_all_kinds_follow_a_policy_unlike_pytorchs(
    where: str, policy: Policy, name: str, way: str
) -> None:
    module = fresh(name)
    script = WAYS[way](module)
    for theirs, ours in _runs(module, script, lambda: REGIONS[where](policy)):
        assert ours[0].dtype is (torch.float32 if policy is KEEP else torch.bfloat16)
        assert ours[0].dtype is theirs[0].dtype
        assert all(map(torch.equal, ours, theirs))


def _runs(module: torch.nn.Module, script: Any, region: Callable[[], Any]) -> Iterator[Any]:
    """What each run gives, in Python and in TorchScript: the executor profiles first, then optimises."""
    x = torch.randn(2, 4)
    for _ in range(4):
        results = []
        for callee in (module, script):
            with region():
                y = callee(x)
            leaves = list(callee.parameters()) if y.requires_grad else []
            given = (
                torch.autograd.grad(y.float().sum(), leaves, allow_unused=True) if leaves else ()
            )
            results.append([y, *(g for g in given if g is not None)])
        yield results


def test_a_rule_unlike_pytorchs_gets_unrounded_inputs() -> None:
    keep = Policy.load("torch").replace(ops={"linear": "fp32"})
    net, script = scripted()
    x = torch.randn(2, 4)
    for _ in range(4):
        with precast.autocast("cpu", policy=keep):
            y = script(x)
        assert y.dtype is torch.float32
        assert torch.equal(y, net(x))
    torch.autograd.grad(y.sum(), list(net.parameters()))


def test_pytorchs_pass_rounds_before_any_rule_is_asked() -> None:
    _, script = scripted()
    with torch.autocast("cpu"):
        graph = str(script.graph_for(torch.randn(2, 4)))
    assert "_autocast_to_reduced_precision" in graph


def test_only_policies_unlike_pytorchs_switch_the_optimiser_off() -> None:
    keep = Policy.load("torch").replace(ops={"linear": "fp32"})
    for policy in ("torch", "default"):
        with precast.autocast("cpu", policy=policy):
            assert _torch.optimizes_torchscript()
    with precast.autocast("cpu", policy=keep):
        assert not _torch.optimizes_torchscript()
        with precast.autocast("cpu", enabled=False):
            assert not _torch.optimizes_torchscript()
        thread = threading.Thread(target=lambda: elsewhere.append(_torch.optimizes_torchscript()))
        elsewhere: list[bool] = []
        thread.start()
        thread.join()
        assert elsewhere == [True]
    assert _torch.optimizes_torchscript()


def test_a_known_limit_what_ran_under_pytorchs_policy_first_keeps_its_casts() -> None:
    keep = Policy.load("torch").replace(ops={"linear": "fp32"})
    net, script = scripted()
    x = torch.randn(
        64, 4
    )  # enough rows for some to be no zeros, which would be equal in all dtypes
    with torch.autocast("cpu"):
        script(x)
    with precast.autocast("cpu", policy=keep):
        y = script(x)
    assert y.dtype is torch.float32
    assert not torch.equal(y, net(x)), "no longer a limit: say so in docs/differences.md"


def test_a_known_limit_what_ran_under_another_policy_first_cannot_be_trained_under_pytorchs() -> (
    None
):
    keep = Policy.load("torch").replace(ops={"relu": "fp32"})
    net, script = scripted()
    x = torch.randn(2, 4)
    for policy in (keep, "torch"):
        for _ in range(4):
            with precast.autocast("cpu", policy=policy):
                y = script(x)
    with pytest.raises(
        RuntimeError, match="same dtype"
    ):  # loud, at least; says docs/differences.md
        torch.autograd.grad(y.float().sum(), list(net.parameters()))


def test_a_known_limit_a_region_that_a_scripted_function_opens_has_pytorchs_policy() -> None:
    """Nobody enters it: TorchScript's own pass writes casts into the graph."""

    @torch.jit.script
    def opening(x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return torch.mm(x, x)

    x = torch.randn(3, 3)
    with precast.install(KEEP):
        assert opening(x).dtype is torch.bfloat16, "no longer a limit: docs/differences.md"
        with torch.autocast("cpu"):
            assert torch.mm(x, x).dtype is torch.float32


def test_what_is_forked_runs_in_the_policy_of_the_thread_that_forks() -> None:

    @torch.jit.script
    def forked(x: Tensor) -> Tensor:
        return torch.jit.wait(torch.jit.fork(torch.mm, x, x))

    x = torch.randn(3, 3)
    with precast.autocast("cpu", policy=KEEP):
        assert torch.mm(x, x).dtype is torch.float32
        assert forked(x).dtype is torch.float32


@pytest.mark.parametrize("engine", registration.available_engines())
def test_what_is_forked_after_a_region_runs_without_its_policy(engine: str) -> None:

    @torch.jit.script
    def forked(x: Tensor) -> Tensor:
        return torch.jit.wait(torch.jit.fork(torch.mm, x, x))

    x, policy, found = torch.randn(3, 3), KEEP.replace(name="of this test alone"), []

    def in_a_thread_that_had_no_region() -> None:
        with torch.autocast("cpu"):
            forked(x), forked(x)
        for _ in range(3):
            with precast.autocast("cpu", policy=policy):
                pass
            with torch.autocast("cpu"):
                found.append(forked(x).dtype)

    with registration.use_engine(engine):
        thread = threading.Thread(target=in_a_thread_that_had_no_region)
        thread.start()
        thread.join()
    assert found == [torch.bfloat16] * 3


@pytest.mark.parametrize("entered", ["once", "for each call"])
def test_a_trace_records_nothing_of_the_search_for_unversioned_writes(entered: str) -> None:
    outer, inner = precast.autocast("cpu"), nullcontext()
    if entered == "for each call":
        outer, inner = inner, outer

    class Repeated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(160, 160)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2 * USES_BETWEEN_CHECKS):
                with inner:
                    x = self.layer(x)
            return x

    model, x = Repeated(), torch.randn(2, 160)
    attachment = precast.attach(model)
    with torch.no_grad(), outer, warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        model(x), model(x)
        traced = torch.jit.trace(model, (x,), check_trace=False)
    kinds = {node.kind() for node in traced.inlined_graph.nodes()}
    assert kinds <= {"prim::Constant", "prim::GetAttr", "aten::to", "aten::linear"}
    attachment.detach()


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("grad", ["grad", "no_grad", "inference_mode"])
def test_a_trace_inside_a_region_has_casts_and_no_copies(
    grad: str, used_before: bool, attached: bool
) -> None:
    model, x = torch.nn.Linear(160, 160), torch.randn(2, 160)
    mode = {"grad": torch.enable_grad, "no_grad": torch.no_grad}.get(grad, torch.inference_mode)
    with pytest.raises(RuntimeError, match="Tensor that requires grad as a constant"):
        with torch.autocast("cpu"):
            torch.jit.trace(model, (x,))
    attachment = precast.attach(model) if attached else None
    with mode(), precast.autocast("cpu"):
        for _ in range(3 if used_before else 0):
            model(x)
        traced = torch.jit.trace(model, (x,))
    assert "Constant[value=<Tensor>" not in str(traced.graph)
    for _ in range(2):
        with torch.no_grad():
            model.weight.add_(1)
        with torch.no_grad(), precast.autocast("cpu"):
            assert torch.equal(traced(x), model(x))
    if attachment is not None:
        attachment.detach()
