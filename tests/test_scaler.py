"""The scaler decides as PyTorch's, bit for bit, and is right where PyTorch's is not."""

from __future__ import annotations

import collections
import copy
import gc
import inspect
import math
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from precast.errors import PrecastWarning, ScalerError
from precast.events import StepEvent, observe
from precast.scaler import GradScaler

Tensor = torch.Tensor
BAD = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def make_parameter(size: int = 3, **kwargs: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(size, **kwargs))


def sgd(parameter: Tensor, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter], lr=0.25, **kwargs)


def started(**kwargs: Any) -> tuple[GradScaler, torch.nn.Parameter, torch.optim.Optimizer]:
    """A scaler after one backward, with the parameter and the optimizer that it is for."""
    parameter = make_parameter()
    scaler = GradScaler("cpu", **kwargs)
    scaler.scale((parameter * 2).sum()).backward()
    return scaler, parameter, sgd(parameter)


def bits(value: Any) -> Any:
    """Something that is equal only for the same bits, NaN included."""
    if isinstance(value, Tensor):
        return (
            value.dtype,
            value.shape,
            value.detach().contiguous().flatten().view(torch.uint8).tolist(),
        )
    return value


# --- the same decisions and numbers as PyTorch's ---

KINDS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "foreach adam": lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=True),
    "fused adam": lambda ps: torch.optim.Adam(ps, lr=0.1, fused=True),
    "fused adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    # Without momentum: where its first step is skipped, PyTorch's fused SGD leaves its momentum
    # uninitialised, whoever's scaler it is under.
    "fused sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True),
    "fused adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, fused=True),
}

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
        st.sampled_from([1.0, 2.0**16, 2.0**-140, 1e38, 3.3e38, 12345.678]),
        st.sampled_from([2.0, 1.5, 1000.0]),
        st.sampled_from([0.5, 0.1, 1e-20]),
        st.integers(1, 3),
    ),
    script=st.lists(iterations, min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
def test_scale_tracker_and_parameters_equal_torchs(
    kinds: list[str], numbers: tuple[float, float, float, int], script: list[Any], seed: int
) -> None:
    ours = Training(GradScaler("cpu", *numbers), kinds)
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


def test_float16_gradients_are_refused_as_torch_does() -> None:
    parameter = make_parameter(dtype=torch.float16)
    parameter.grad = torch.ones_like(parameter)
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(torch.ones(1))
    with pytest.raises(ValueError, match="FP16"):
        theirs.unscale_(sgd(parameter))

    ours = GradScaler("cpu")
    ours.scale(torch.ones(1))
    with pytest.raises(ScalerError, match=r"float16 gradient .*shape \(3,\) in group 0.*float32"):
        ours.unscale_(sgd(parameter))
    with pytest.raises(ScalerError, match="float16"):
        ours.step(sgd(parameter))


def test_unscaled_gradients_can_be_clipped() -> None:
    scaler, parameter, optimizer = started()
    before = parameter.detach().clone()
    scaler.unscale_(optimizer)
    assert torch.equal(parameter.grad, torch.full((3,), 2.0))
    torch.nn.utils.clip_grad_value_(parameter, 0.5)
    scaler.step(optimizer)
    assert torch.equal(parameter, before - 0.125)


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
    with pytest.warns(FutureWarning, match="grad_scaler") as warned:
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


# --- order of calls ---


def test_calls_before_any_loss_was_scaled() -> None:
    scaler, optimizer = GradScaler("cpu"), sgd(make_parameter())
    for call in (lambda: scaler.unscale_(optimizer), lambda: scaler.step(optimizer), scaler.update):
        with pytest.raises(ScalerError, match=r"before any loss was scaled.*scale\(loss\)"):
            call()


def test_unscaling_twice() -> None:
    scaler, _, optimizer = started()
    scaler.unscale_(optimizer)
    with pytest.raises(ScalerError, match="twice"):
        scaler.unscale_(optimizer)


def test_unscaling_after_the_step() -> None:
    scaler, _, optimizer = started()
    scaler.step(optimizer)
    with pytest.raises(ScalerError, match="after step"):
        scaler.unscale_(optimizer)


def test_two_steps_in_one_iteration() -> None:
    scaler, _, optimizer = started()
    scaler.step(optimizer)
    with pytest.raises(ScalerError, match=r"twice.*update\(\)"):
        scaler.step(optimizer)
    scaler.update()
    scaler.step(optimizer)


def test_no_gradients_to_check() -> None:
    scaler, _, _ = started()
    with pytest.raises(ScalerError, match="no gradients were checked"):
        scaler.step(sgd(make_parameter()))
    with pytest.raises(ScalerError, match="no gradients were checked"):
        scaler.update()
    scaler.update(4.0)
    assert scaler.get_scale() == 4.0


def test_an_optimizer_made_within_an_iteration_is_never_mistaken_for_a_dead_one() -> None:
    mistaken = dict.fromkeys((GradScaler, torch.amp.GradScaler), 0)
    for kind in mistaken:
        scaler = kind("cpu")
        scaler.scale(torch.ones(1))
        for _ in range(20):
            parameter = make_parameter()
            parameter.grad = torch.ones_like(parameter)
            optimizer = sgd(parameter)
            try:
                scaler.step(optimizer)
            except RuntimeError:  # "step() has already been called"
                mistaken[kind] += 1
            del optimizer
            gc.collect()
    assert mistaken[GradScaler] == 0
    assert mistaken[torch.amp.GradScaler] > 0  # keyed by the id of a dead optimizer


# --- closures ---


def test_closures_are_refused_by_name_and_by_position() -> None:
    def closure() -> float:
        return 0.0

    theirs = torch.amp.GradScaler("cpu")
    parameter = make_parameter()
    theirs.scale(parameter.sum()).backward()
    with pytest.raises(RuntimeError, match="Closure"):
        theirs.step(sgd(parameter), closure=closure)
    assert theirs.step(sgd(parameter), closure) == 0.0  # let through by position

    scaler, parameter, optimizer = started()
    before = parameter.detach().clone()
    with pytest.raises(ScalerError, match="got a closure"):
        scaler.step(optimizer, closure=closure)
    with pytest.raises(ScalerError, match="got a closure"):
        scaler.step(optimizer, closure)
    assert torch.equal(parameter, before)


@pytest.mark.parametrize("how", [((None,), {}), ((), {"closure": None})])
def test_no_closure_is_not_a_closure(how: Any) -> None:
    args, kwargs = how
    scaler, parameter, optimizer = started()
    before = parameter.detach().clone()
    scaler.step(optimizer, *args, **kwargs)
    assert not torch.equal(parameter, before)


# --- a scaler that is off ---


def test_a_disabled_scaler_passes_everything_through() -> None:
    scaler = GradScaler("cpu", enabled=False)
    parameter = make_parameter()
    before, optimizer = parameter.detach().clone(), sgd(parameter)
    outputs = [parameter.sum(), "anything"]
    assert scaler.scale(outputs) is outputs
    outputs[0].backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.update(new_scale=3.0)
    assert torch.equal(parameter, before - 0.25)
    assert scaler.step(optimizer, lambda: 7.0) == 7.0  # its own step, so its own closures
    scaler.load_state_dict({"scale": 3.0})
    assert scaler.get_scale() == 1.0


def test_a_disabled_scaler_answers_every_getter() -> None:
    names = [n for n in dir(torch.amp.GradScaler) if n.startswith("get_")]
    assert set(names) == {
        "get_scale",
        "get_growth_factor",
        "get_backoff_factor",
        "get_growth_interval",
    }
    mute = []
    for name in names:
        try:
            getattr(torch.amp.GradScaler("cpu", enabled=False), name)()
        except AttributeError:
            mute.append(name)
    assert sorted(mute) == ["get_backoff_factor", "get_growth_factor", "get_growth_interval"]

    ours = GradScaler("cpu", 8.0, 3.0, 0.25, 7, enabled=False)
    answers = {name: getattr(ours, name)() for name in names}
    assert answers == {
        "get_scale": 1.0,
        "get_growth_factor": 3.0,
        "get_backoff_factor": 0.25,
        "get_growth_interval": 7,
    }
    assert ours._get_growth_tracker() == 0
    assert ours.state_dict() == {}
    assert ours.is_enabled() is False
    ours.set_growth_factor(5.0)
    assert ours.get_growth_factor() == 5.0


def test_a_disabled_scaler_survives_pickling() -> None:
    scaler = pickle.loads(pickle.dumps(GradScaler("cpu", enabled=False, growth_interval=5)))
    assert not scaler.is_enabled()
    assert scaler.get_growth_interval() == 5


def test_without_cuda_the_scaler_warns_and_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(PrecastWarning, match="no CUDA") as warned:
        scaler = GradScaler("cuda")
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert not scaler.is_enabled()
    GradScaler("cuda", enabled=False)  # silent
    assert GradScaler("cpu").is_enabled()


# --- settings and state ---


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *[("init_scale", v) for v in (0.0, -1.0, math.inf, math.nan, 1e39, "big", None)],
        *[("growth_factor", v) for v in (1.0, 0.5, math.inf, math.nan, "2")],
        *[("backoff_factor", v) for v in (1.0, 0.0, -0.5, 2.0, math.nan)],
        *[("growth_interval", v) for v in (0, -3, 1.5, "10", None)],
    ],
)
def test_settings_out_of_range_are_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(ScalerError, match=f"{name} must be .*got {re.escape(repr(bad))}"):
        GradScaler("cpu", **{name: bad})
    GradScaler("cpu", enabled=False, **{name: bad})  # never used


@pytest.mark.parametrize("bad", ["gpu", "", 65536.0, None])
def test_an_unknown_device_is_refused(bad: Any) -> None:
    with pytest.raises(ScalerError, match="first argument is the device"):
        GradScaler(bad)


def test_setters_take_effect_and_refuse_nonsense() -> None:
    scaler, _, optimizer = started(init_scale=8.0)
    scaler.set_growth_factor(1.0)  # a common way to freeze the scale
    scaler.set_growth_interval(1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    scaler.set_backoff_factor(1.0)
    assert scaler.get_backoff_factor() == 1.0
    for setter in (scaler.set_growth_factor, scaler.set_backoff_factor, scaler.set_growth_interval):
        for bad in (0, -1.0, math.nan, "x"):
            with pytest.raises(ScalerError):
                setter(bad)


@pytest.mark.parametrize(
    "new", [3.0, 3, torch.tensor(3.0), torch.tensor([3]), torch.full((1, 1), 3.0)]
)
def test_a_new_scale_by_number_or_tensor(new: Any) -> None:
    scaler, _, _ = started()
    scaler.update(new)
    assert scaler.get_scale() == 3.0
    if isinstance(new, Tensor):
        assert new.flatten().tolist() == [3.0]


def test_a_new_scale_of_shape_one_which_torch_documents_and_refuses() -> None:
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(torch.ones(1))
    with pytest.raises(RuntimeError, match="broadcast"):
        theirs.update(torch.tensor([3.0]))


@pytest.mark.parametrize(
    "bad",
    [
        0.0,
        -1.0,
        math.inf,
        math.nan,
        "3",
        torch.ones(2),
        torch.ones((), requires_grad=True),
        torch.ones(1, device="meta"),
    ],
    ids=str,
)
def test_a_bad_new_scale_is_refused_and_nothing_changes(bad: Any) -> None:
    scaler, _, _ = started(init_scale=8.0)
    with pytest.raises(ScalerError, match="new_scale must be"):
        scaler.update(bad)
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize(
    "direction", [(GradScaler, torch.amp.GradScaler), (torch.amp.GradScaler, GradScaler)]
)
def test_states_move_between_our_scaler_and_torchs(direction: Any, lazy: bool) -> None:
    source, target = direction[0]("cpu", 3.0, 4.0, 0.5, 2), direction[1]("cpu", 6.0, 7.0, 0.8, 1)
    parameter = make_parameter()
    source.scale(parameter.sum()).backward()
    source.step(sgd(parameter))
    source.update()
    if not lazy:
        target.scale(torch.ones(1))
    target.load_state_dict(source.state_dict())
    expected = {
        "scale": 3.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
        "_growth_tracker": 1,
    }
    assert source.state_dict() == target.state_dict() == expected
    assert torch.equal(target.scale(torch.ones(1)), torch.full((1,), 3.0))
    assert target.state_dict() == expected


def test_loading_keeps_the_scale_tensor_itself() -> None:
    scaler, _, _ = started()
    tensor = scaler._get_scale_async()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 5.0})
    assert scaler._get_scale_async() is tensor
    assert tensor.item() == 5.0


@pytest.mark.parametrize("state", [{}, {"scale": 2.0}])
def test_an_incomplete_state_is_refused(state: dict[str, Any]) -> None:
    scaler = GradScaler("cpu")
    with pytest.raises(ScalerError, match=r"without .*growth_interval.*off"):
        scaler.load_state_dict(state)
    assert scaler.get_scale() == 2.0**16


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_goes_on_where_the_scaler_was(duplicate: Any) -> None:
    scaler, parameter, optimizer = started(growth_interval=2, init_scale=8.0)
    scaler.step(optimizer)
    with pytest.raises(ScalerError, match=r"inside an iteration.*after update\(\)"):
        duplicate(scaler)
    scaler.update()
    twin = duplicate(scaler)
    assert twin.state_dict() == scaler.state_dict()
    assert twin.state_dict()["_growth_tracker"] == 1
    twin.scale((parameter * 2).sum()).backward()
    twin.step(optimizer)
    twin.update()
    assert (twin.get_scale(), scaler.get_scale()) == (16.0, 8.0)


# --- a drop-in for torch.amp.GradScaler ---


def test_it_is_recognised_and_inherits_no_public_logic() -> None:
    assert isinstance(GradScaler("cpu"), torch.amp.GradScaler)
    public = [name for name in vars(torch.amp.GradScaler) if not name.startswith("_")]
    assert set(public) <= set(vars(GradScaler))


@pytest.mark.parametrize("name", [n for n in vars(torch.amp.GradScaler) if not n.startswith("_")])
def test_signatures_are_torchs(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(c, name)) for c in (GradScaler, torch.amp.GradScaler))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


def test_the_constructors_signature_is_torchs_and_one_keyword() -> None:
    ours, theirs = (inspect.signature(c) for c in (GradScaler, torch.amp.GradScaler))
    extra = set(ours.parameters) - set(theirs.parameters)
    assert extra == {"reduce_found_inf"}
    assert [(p.name, p.default) for p in ours.parameters.values() if p.name not in extra] == [
        (p.name, p.default) for p in theirs.parameters.values()
    ]


def test_a_subclass_can_override_a_part() -> None:
    class Doubling(GradScaler):
        def unscale_(self, optimizer: Any) -> None:
            super().unscale_(optimizer)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.mul_(2)

    parameter = make_parameter()
    before = parameter.detach().clone()
    scaler = Doubling("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.step(sgd(parameter))
    assert torch.equal(parameter, before - 0.5)


# --- seams: observers, reductions, what waits for the device ---


def test_observers_hear_of_every_step() -> None:
    events: list[StepEvent] = []
    parameters = [make_parameter(), make_parameter()]
    optimizers = [sgd(parameters[0]), torch.optim.Adam([parameters[1]], fused=True)]
    scaler = GradScaler("cpu", init_scale=8.0)
    with observe(events.append):
        for factor in (1.0, math.inf):
            for parameter, optimizer in zip(parameters, optimizers, strict=True):
                optimizer.zero_grad()
                scaler.scale((parameter * factor).sum()).backward()
                scaler.step(optimizer)
            scaler.update()
    assert [(e.optimizer, e.step, float(e.scale), bool(e.skipped)) for e in events] == [
        (0, 0, 8.0, False),
        (1, 0, 8.0, False),
        (0, 1, 8.0, True),
        (1, 1, 8.0, True),
    ]


class Calls(TorchDispatchMode):
    """Counts the operations that run; reading a value waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def waits(self) -> int:
        return self.counts["aten::_local_scalar_dense"]


def iterate(scaler: Any, fused: bool) -> Calls:
    parameter = make_parameter()
    optimizer = torch.optim.Adam([parameter], fused=fused, foreach=False)
    with Calls() as calls:
        for _ in range(3):
            scaler.scale(parameter.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    return calls


@pytest.mark.parametrize("fused", [True, False])
def test_no_more_waits_and_no_more_operations_than_torch(fused: bool) -> None:
    ours, theirs = iterate(GradScaler("cpu"), fused), iterate(torch.amp.GradScaler("cpu"), fused)
    assert theirs.waits > 0 or fused
    assert ours.waits <= theirs.waits
    assert ours.counts.total() <= theirs.counts.total()


@pytest.mark.parametrize("fused", [True, False])
def test_observing_waits_for_nothing(fused: bool) -> None:
    alone = iterate(GradScaler("cpu"), fused)
    with observe(lambda event: None):
        observed = iterate(GradScaler("cpu"), fused)
    assert observed.waits == alone.waits
    assert observed.counts.total() > alone.counts.total()  # the copy of the scale, only then


def mark_bad(verdicts: list[Tensor]) -> None:
    for verdict in verdicts:
        verdict.fill_(1.0)


@pytest.mark.parametrize("kind", ["sgd", "fused adam"])
def test_a_reduction_of_the_verdicts_decides(kind: str) -> None:
    """Another process found a bad gradient: this one skips too, even if it has no gradients."""
    parameter = make_parameter()
    before = parameter.detach().clone()
    scaler = GradScaler("cpu", init_scale=8.0, reduce_found_inf=mark_bad)
    scaler.scale(parameter.sum()).backward()
    scaler.step(KINDS[kind]([parameter]))
    scaler.step(KINDS[kind]([make_parameter()]))
    scaler.update()
    assert torch.equal(parameter, before)
    assert scaler.get_scale() == 4.0
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == 4.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnCuda:
    def test_losses_and_gradients_on_two_devices(self) -> None:
        parameters = [make_parameter(), make_parameter(device="cuda")]
        before = [p.detach().clone() for p in parameters]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        scaler = GradScaler("cuda", init_scale=8.0)
        for factor, scale in ((1.0, 8.0), (math.inf, 4.0)):
            optimizer.zero_grad()
            losses = scaler.scale([parameters[0].sum(), (parameters[1] * factor).sum()])
            assert [t.device.type for t in losses] == ["cpu", "cuda"]
            torch.autograd.backward(losses)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale
        assert all(torch.equal(p, b - 1) for p, b in zip(parameters, before, strict=True))

    def test_a_fused_step_never_waits(self) -> None:
        parameter = make_parameter(device="cuda")
        optimizer = torch.optim.Adam([parameter], fused=True)
        scaler = GradScaler("cuda")
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with observe(lambda event: None):
                scaler.scale(parameter.sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_float16_training_equals_torchs(self) -> None:
        torch.manual_seed(0)
        start = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )
        data = [torch.randn(32, 16, device="cuda") * 10.0**k for k in (0, 3, 0, 4, 0, 0)]
        results = []
        for scaler in (GradScaler(growth_interval=2), torch.amp.GradScaler(growth_interval=2)):
            model = copy.deepcopy(start).cuda()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            scales = []
            for x in data:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = model(x).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            results.append((scales, [bits(p.cpu()) for p in model.parameters()]))
        assert len(set(results[0][0])) > 2
        assert results[0] == results[1]
