"""The scaler decides and computes as PyTorch's, bit for bit, on any optimizer and container."""

from __future__ import annotations

import collections
import math
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precast.errors import ScalerError
from precast.grad_scaler.scaler import GradScaler
from tests.support.scaling import KINDS, bits, make_parameter, sgd, started

Tensor = torch.Tensor
BAD = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


# --- the same decisions and numbers as PyTorch's ---

turns = st.fixed_dictionaries(
    {
        "gradient": st.sampled_from(["good", "good", "good", "tiny", *BAD, "absent"]),
        "unscale first": st.booleans(),
    }
)
iterations = st.fixed_dictionaries(
    {
        "turns": st.lists(turns, min_size=3, max_size=3),
        "new scale": st.none() | st.none() | st.sampled_from([3.0, 1024.0, 2.0**-10]),
        "state moves": st.booleans(),
    }
)


class Training:
    """Three optimizers under one scaler, driven by a script."""

    def __init__(self, scaler: Any, kinds: list[str]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.scaler = scaler
        self.parameters = [
            [torch.nn.Parameter(torch.randn(n, 2, generator=generator, dtype=d)) for n, d in shapes]
            for shapes in [
                [(2, torch.float32), (1, torch.float64)],
                [(3, torch.float32)],
                [(1, torch.float32)],
            ]
        ]
        self.optimizers = [KINDS[k](ps) for k, ps in zip(kinds, self.parameters, strict=True)]

    def run(self, script: dict[str, Any], seed: int) -> list[Any]:
        loss = self.scaler.scale(torch.ones(2))
        checked = False
        for turn, optimizer, parameters in zip(
            script["turns"], self.optimizers, self.parameters, strict=True
        ):
            if turn["gradient"] != "absent":
                checked = True
                self.take(turn, optimizer, parameters, torch.Generator().manual_seed(seed))
        if checked or script["new scale"]:
            self.scaler.update(script["new scale"])
        if script["state moves"]:
            self.scaler.load_state_dict(self.scaler.state_dict())
        everything = [loss, self.scaler.get_scale(), self.scaler._get_growth_tracker()]
        for optimizer, parameters in zip(self.optimizers, self.parameters, strict=True):
            everything += [x for p in parameters for x in (p, p.grad)]
            everything += [v for s in optimizer.state.values() for v in s.values()]
        return [bits(x) for x in everything]

    def take(self, turn: Any, optimizer: Any, parameters: list[Tensor], generator: Any) -> None:
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.grad = gradient * (1e-44 if turn["gradient"] == "tiny" else 100.0)
        if turn["gradient"] in BAD:
            parameters[-1].grad[0, 1] = BAD[turn["gradient"]]
        if turn["unscale first"]:
            self.scaler.unscale_(optimizer)
        self.scaler.step(optimizer)


@settings(max_examples=150, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=3, max_size=3),
    numbers=st.tuples(
        st.sampled_from([1.0, 2.0**16, 2.0**-40, 1e38, 3.3e38, 12345.678]),
        st.sampled_from([2.0, 1.5, 1000.0]),
        st.sampled_from([0.5, 0.1, 0.001]),
        st.integers(1, 3),
    ),
    script=st.lists(iterations, min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
def test_scale_tracker_and_parameters_equal_torchs(
    kinds: list[str], numbers: tuple[float, float, float, int], script: list[Any], seed: int
) -> None:
    # Below 2**-126, where PyTorch goes on, ours stays: 8 iterations of 0.001 do not get there.
    scaler = GradScaler("cpu", *numbers, min_scale=2.0**-126, on_verdict="ignore")
    ours = Training(scaler, kinds)
    theirs = Training(torch.amp.GradScaler("cpu", *numbers), kinds)
    for number, iteration in enumerate(script):
        assert ours.run(iteration, seed + number) == theirs.run(iteration, seed + number)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_a_bad_gradient_leaves_everything_alone(kind: str) -> None:
    parameter = make_parameter()
    before = parameter.detach().clone()
    optimizer = KINDS[kind]([parameter])
    scaler = GradScaler("cpu")
    scaler.scale((parameter * math.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(parameter, before)
    assert scaler.get_scale() == 2.0**15


def test_training_is_the_same_with_and_without_scaling() -> None:
    plain, scaled = torch.nn.Linear(4, 2).double(), torch.nn.Linear(4, 2).double()
    scaled.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, scaled)]
    scaler = GradScaler("cpu", growth_interval=2)
    for _ in range(5):
        x = torch.randn(8, 4, dtype=torch.float64)
        plain(x).square().mean().backward()
        optimizers[0].step()
        scaler.scale(scaled(x).square().mean()).backward()
        scaler.step(optimizers[1])
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**18
    assert torch.equal(plain.weight, scaled.weight)  # powers of two lose nothing


def test_two_losses_into_one_optimizer() -> None:
    scaler, parameter, optimizer = started(init_scale=8.0)
    before = parameter.detach().clone()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(parameter, before - 0.25 * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_a_scaled_loss_is_bitwise_torchs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    loss = torch.randn(shape).to(dtype)
    ours, theirs = GradScaler("cpu"), torch.amp.GradScaler("cpu")
    assert bits(ours.scale(loss)) == bits(theirs.scale(loss))


# --- what a step does with gradients ---


def sparse(values: list[float], dtype: torch.dtype) -> Tensor:
    indices = torch.tensor([[0, 1, 0], [2, 0, 2]])  # the first and the last are one element
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sparse invariants are in beta
        return torch.sparse_coo_tensor(indices, torch.tensor(values, dtype=dtype), (2, 3))


@pytest.mark.parametrize("values", [[16.0, 32.0, 64.0], [1.0, math.inf, 1.0], [1.0, 1.0, math.nan]])
def test_sparse_gradients(values: list[float]) -> None:
    results = []
    for scaler in (GradScaler("cpu", 4.0), torch.amp.GradScaler("cpu", 4.0)):
        parameter = torch.nn.Parameter(torch.ones(2, 3))
        parameter.grad = sparse(values, torch.float32)
        scaler.scale(torch.ones(1))
        scaler.step(sgd(parameter))
        scaler.update()
        results.append([bits(parameter), bits(parameter.grad.to_dense()), scaler.get_scale()])
    assert results[0] == results[1]


def test_a_sparse_float16_sum_that_overflows_is_found() -> None:
    verdicts = []
    for scaler in (GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        parameter = torch.zeros(2, 3, dtype=torch.float16).to_sparse()
        parameter.grad = sparse([64000.0, 32.0, 64000.0], torch.float16)
        one, zero = torch.ones(()), torch.zeros(())
        found = scaler._unscale_grads_(sgd(parameter), one, zero, True)
        assert parameter.grad.is_coalesced()
        verdicts.append(found[torch.device("cpu")].item())
    assert verdicts == [1.0, 1.0]


def test_unscaled_gradients_can_be_clipped() -> None:
    scaler, parameter, optimizer = started()
    before = parameter.detach().clone()
    scaler.unscale_(optimizer)
    assert torch.equal(parameter.grad, torch.full((3,), 2.0))
    torch.nn.utils.clip_grad_value_(parameter, 0.5)
    scaler.step(optimizer)
    assert torch.equal(parameter, before - 0.125)


def test_a_scaler_says_whether_gradients_are_unscaled() -> None:
    scaler, _, optimizer = started()
    other = sgd(make_parameter())
    assert not scaler.is_unscaled(optimizer)
    scaler.unscale_(optimizer)
    assert scaler.is_unscaled(optimizer)
    assert not scaler.is_unscaled(other)
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.is_unscaled(optimizer), "the next iteration's are not yet"
    assert GradScaler("cpu", enabled=False).is_unscaled(optimizer), "never scaled"


def test_what_the_optimizers_step_returns_comes_back() -> None:
    class Told(torch.optim.SGD):
        def step(self, closure: Any = None, factor: int = 1) -> Any:
            return 10 * factor

    scaler, parameter, _ = started()
    assert scaler.step(Told([parameter], lr=1.0), factor=4) == 40


def test_a_user_set_grad_scale_is_divided_by_as_well() -> None:
    parameter = torch.nn.Parameter(torch.ones(5, 5))
    parameter.grad = torch.full_like(parameter, 15.0)
    optimizer = torch.optim.Adam([parameter], fused=True)
    optimizer.grad_scale = torch.tensor([3.0])
    scaler = GradScaler("cpu", init_scale=5.0)
    scaler.scale(torch.ones(5))
    scaler.step(optimizer)
    assert torch.equal(parameter.grad, torch.ones_like(parameter))


class Scaling(torch.optim.Optimizer):
    """An optimizer with a scaling of its own, for the two contracts that PyTorch has had."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})


def test_an_optimizer_that_scales_reads_its_attributes() -> None:
    class Reads(Scaling):
        def step(self, closure: Any = None) -> None:
            self.seen = self.grad_scale, self.found_inf

    scaler, parameter, _ = started(init_scale=16.0)
    optimizer = Reads([parameter])
    scaler.step(optimizer)
    assert [t.item() for t in optimizer.seen] == [16.0, 0.0]
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    assert torch.equal(parameter.grad, torch.full((3,), 32.0))  # the optimizer is to unscale


def test_attributes_are_taken_back_when_the_step_fails() -> None:
    class Fails(Scaling):
        def step(self, closure: Any = None) -> None:
            raise KeyError

    scaler, parameter, _ = started()
    optimizer = Fails([parameter])
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "found_inf")


def test_an_optimizer_of_the_old_contract_gets_the_scaler() -> None:
    class Takes(Scaling):
        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
            assert not hasattr(self, "grad_scale")
            assert grad_scaler._found_inf_per_device(self) == {}
            self.checked = grad_scaler._check_inf_per_device(self)
            self.scale = grad_scaler._get_scale_async()

    scaler, parameter, _ = started(init_scale=16.0)
    optimizer = Takes([parameter])
    with pytest.warns(FutureWarning, match="GradScaler is going to stop") as warned:
        scaler.step(optimizer)
    assert warned[0].filename == __file__
    assert optimizer.checked == {torch.device("cpu"): torch.zeros(())}
    assert optimizer.scale.item() == 16.0
    scaler.update()


def test_a_fused_optimizer_without_gradients_does_nothing() -> None:
    scaler, _, optimizer = started()
    scaler.step(torch.optim.Adam([make_parameter()], fused=True))
    scaler.step(optimizer)
    scaler.update()


# --- what is scaled ---


class Losses(NamedTuple):
    main: Any
    extra: Any = None


def test_losses_in_any_container() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    one = torch.ones(2)
    outputs = {
        "a": [one, (one, {"n": 3})],
        "b": Losses(one, one.int()),
        "c": collections.deque([one]),
    }
    scaled = scaler.scale(outputs)
    four = torch.full((2,), 4.0)
    assert torch.equal(scaled["a"][0], four)
    assert torch.equal(scaled["a"][1][0], four)
    assert scaled["a"][1][1] == {"n": 3}
    assert torch.equal(scaled["b"].main, four)
    assert scaled["b"].extra is outputs["b"].extra
    assert torch.equal(scaled["c"][0], four)
    assert torch.equal(one, torch.ones(2))


def test_where_torch_breaks_containers_of_losses() -> None:
    one = torch.ones(2)
    theirs = torch.amp.GradScaler("cpu")
    broken = theirs.scale(Losses(one))
    assert isinstance(broken.main, map)  # the whole iterator landed in the first field
    [letters] = theirs.scale({"loss": one})  # walks over the keys; the loss is gone
    assert isinstance(letters, map)

    ours = GradScaler("cpu")
    assert torch.equal(ours.scale(Losses(one)).main, one * 2.0**16)
    assert torch.equal(ours.scale({"loss": one})["loss"], one * 2.0**16)


@pytest.mark.parametrize("lazy", [iter, set, lambda losses: (x for x in losses)])
def test_iterators_and_sets_are_scaled_lazily_as_in_torch(lazy: Any) -> None:
    one = torch.ones(1)
    for scaler in (GradScaler("cpu", 4.0), torch.amp.GradScaler("cpu", 4.0)):
        scaled = scaler.scale(lazy([one]))
        assert isinstance(scaled, map)
        assert [t.item() for t in scaled] == [4.0]
    [nested] = GradScaler("cpu", 4.0).scale([lazy([one])])
    assert [t.item() for t in nested] == [4.0]


@pytest.mark.parametrize("wrong", [3.0, None, "loss", [1.0, None], {"loss": 2.0}])
def test_a_loss_that_is_no_tensor_is_refused(wrong: Any) -> None:
    with pytest.raises(ScalerError, match=f"no tensor in a {type(wrong).__name__}.*loss.item"):
        GradScaler("cpu").scale(wrong)


@pytest.mark.parametrize("empty", [[], (), {}])
def test_no_losses_are_scaled_to_no_losses(empty: Any) -> None:
    assert GradScaler("cpu").scale(empty) is empty
