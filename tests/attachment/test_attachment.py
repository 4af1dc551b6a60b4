"""attach: a model computes what it computes without it, to the bit, while its weights are cast once."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import statistics
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor

import precast
from precast._torch import HostCopy
from precast.attachment import attachment as attachments
from precast.attachment.attachment import Attachment
from precast.engine import registration
from precast.engine.thread_state import regions
from precast.weights import held, unversioned_writes
from tests.support.casts import Casts
from tests.support.unsampled import write_unsampled

BF16 = torch.bfloat16
WIDTH = 160
"""Wide enough for a weight to have a node of its own in the graph, where a bias has none."""


class Net(nn.Module):
    """Weights of every kind: linear with and without bias, convolution, one that is used twice, one that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1).to(memory_format=torch.preserve_format)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = self.twice(F.gelu(self.twice(x)))
        result: Tensor = self.head(self.norm(x))
        return result


def tokens() -> Tensor:
    return torch.randint(0, WIDTH, (2, 5))


def region(dtype: torch.dtype = BF16) -> precast.autocast:
    return precast.autocast("cpu", dtype=dtype, policy="torch")


def pair() -> tuple[Net, Net]:
    model = Net()
    return model, copy.deepcopy(model)


def outcome(model: nn.Module, x: Tensor, dtype: torch.dtype = BF16) -> list[Tensor]:
    with region(dtype):
        y = model(x)
    trained = [p for p in model.parameters() if p.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.float().square().mean(), trained)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype is b.dtype
        assert not a.isnan().any()
        assert torch.equal(a, b)


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    yield
    gc.collect()
    assert held.held_parameters == {}
    assert held.comparison_queue == []
    assert held.attached == []
    assert attachments._registrations == []


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Casts:
    """All casts of weights for a region alone."""
    return Casts(monkeypatch, of_single_uses=True)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_two_hundred_steps_of_training_have_the_losses_of_the_drop_in(dtype: torch.dtype) -> None:
    losses: list[list[float]] = []
    for attached, model in zip((True, False), pair(), strict=True):
        optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with precast.attach(model) if attached else nullcontext():
            torch.manual_seed(1)
            losses.append([])
            for _ in range(200):
                x = tokens()
                with region(dtype):
                    loss = F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())
                loss.backward()
                optim.step()
                optim.zero_grad()
                losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    # The median, as any one batch may be a harder one.
    assert statistics.median(losses[0][-20:]) < losses[0][0] / 2


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_results_are_those_of_the_drop_in_in_every_mode(
    mode: Callable[[], Any], dtype: torch.dtype
) -> None:
    ours, theirs = pair()
    x = tokens()
    with precast.attach(ours):
        for _ in range(3):
            with mode(), region(dtype):
                a, b = ours(x), theirs(x)
            assert_same([a.detach()], [b.detach()])
        assert_same(outcome(ours, x, dtype), outcome(theirs, x, dtype))


def test_nothing_is_cast_and_nothing_allocated_for_weights_once_they_are_held(
    casts: Casts,
) -> None:
    model, x = Net(), tokens()
    with precast.attach(model) as attachment:
        for _ in range(2):
            with torch.no_grad(), region():
                model(x)
        addresses = [
            c.tensor.data_ptr() for h in held.held_parameters.values() for c in h.copies.values()
        ]
        size = attachment.memory()
        casts.clear()
        for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
            with mode(), region():
                model(x)
            with torch.no_grad():
                model.twice.weight.add_(1)
        assert len(casts) == 0
        after = [
            c.tensor.data_ptr() for h in held.held_parameters.values() for c in h.copies.values()
        ]
        assert after == addresses
        assert attachment.memory() == size


def test_in_training_only_small_weights_are_cast_in_each_region(casts: Casts) -> None:
    model, x = Net(), tokens()
    with precast.attach(model):
        for _ in range(3):
            casts.clear()
            outcome(model, x)
    assert len(casts) == 2, "the biases of two layers: their cast is cheaper than a node"


def test_memory_is_two_bytes_for_each_number_that_is_held() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64))
    with precast.attach(model) as attachment:
        assert attachment.memory() == 0, "made when first used"
        with torch.no_grad(), region():
            model(torch.ones(2, 32))
        assert attachment.memory() == 2 * (32 * 64 + 64), "a norm's weight is never cast"
        assert str(attachment.memory()) == "4,224 bytes"
        with torch.no_grad(), region(torch.float16):
            model(torch.ones(2, 32))
        assert attachment.memory() == 4 * (32 * 64 + 64)


def in_place(model: Net) -> None:
    with torch.no_grad():
        model.twice.weight.mul_(-2)


def by_load_state_dict(model: Net) -> None:
    model.load_state_dict({name: -2 * value for name, value in model.state_dict().items()})


def by_assignment(model: Net) -> None:
    state = {name: -2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def by_other_data(model: Net) -> None:
    model.twice.weight.data = -2 * model.twice.weight.data


def by_a_new_parameter(model: Net) -> None:
    model.twice.weight = nn.Parameter(-2 * model.twice.weight.detach())


def by_a_new_module(model: Net) -> None:
    torch.manual_seed(3)
    model.twice = nn.Linear(WIDTH, WIDTH)


def by_an_optimizer(model: Net) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.Adam(model.parameters(), lr=0.5, fused=True).step()


def by_freezing(model: Net) -> None:
    model.twice.weight.requires_grad_(False)


def by_a_hook_of_weights(model: Net) -> None:
    parametrizations.weight_norm(model.twice)


def by_other_layout(model: Net) -> None:
    model.twice.weight.data = -model.twice.weight.data.t().contiguous().t()


def by_its_own_transpose(model: Net) -> None:
    model.twice.weight.data = model.twice.weight.data.t()


def by_other_strides(model: Net) -> None:
    weight = model.twice.weight
    weight.data = weight.data.flatten()[: WIDTH * WIDTH // 2].as_strided((WIDTH, WIDTH), (1, 7))


CHANGES = [
    in_place,
    by_load_state_dict,
    by_assignment,
    by_other_data,
    by_a_new_parameter,
    by_a_new_module,
    by_an_optimizer,
    by_freezing,
    by_a_hook_of_weights,
    by_other_layout,
    by_its_own_transpose,
    by_other_strides,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_change_of_the_model_is_seen_at_once(
    change: Callable[[Net], None], mode: Callable[[], Any]
) -> None:
    ours, theirs = pair()
    x = tokens()
    with precast.attach(ours):
        for _ in range(2):
            with mode(), region():
                before = ours(x)
        change(ours)
        change(theirs)
        with mode(), region():
            assert_same([ours(x).detach()], [theirs(x).detach()])
            if change not in (
                by_freezing,
                by_a_hook_of_weights,
            ):  # which leave the numbers as they are
                assert not torch.equal(ours(x), before)
        assert_same(outcome(ours, x), outcome(theirs, x))


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_weight_that_becomes_a_part_of_itself_is_seen_at_once(mode: Any, attached: bool) -> None:
    model, unrelated = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
    x = torch.randn(2, WIDTH)
    with precast.attach(nn.ModuleList([model, unrelated]), hold=attached), mode():
        with region():
            for _ in range(3):
                model(x)
                unrelated(x)
            model.weight.data = model.weight.data[:100]
            assert torch.equal(model(x), F.linear(x.to(BF16), model.weight.to(BF16)))
        for rows in (70, 30):
            model.weight.data = model.weight.data[:rows]
            for _ in range(4):
                with region():
                    assert unrelated(x).shape == (2, WIDTH)
            with region():
                assert torch.equal(model(x), F.linear(x.to(BF16), model.weight.to(BF16)))
                model.weight.data = model.weight.data[1:].t().contiguous().t()
                assert torch.equal(model(x), F.linear(x.to(BF16), model.weight.to(BF16)))


def test_a_change_inside_a_region_is_seen_too() -> None:
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(2, WIDTH)
    with precast.attach(model), region():
        assert model(x).abs().sum() > 0
        with torch.no_grad():
            assert model(x).abs().sum() > 0
            model.weight.zero_()
            assert model(x).abs().sum() == 0
        assert model(x).abs().sum() == 0


def test_what_is_added_or_replaced_is_held_from_the_next_region_on(casts: Casts) -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)), torch.randn(2, WIDTH)
    with precast.attach(model) as attachment:
        model.append(nn.Linear(WIDTH, 8, bias=False))
        model[0].weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        for _ in range(2):
            with torch.no_grad(), region():
                model(x)
        assert len(casts) == 0
        gc.collect()
        assert attachment.memory() == 2 * WIDTH * (WIDTH + 8)
        assert "2 parameters" in repr(attachment)


def test_what_a_conversion_puts_in_the_place_of_a_parameter_is_held(casts: Casts) -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    with precast.attach(model) as attachment:
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        model.double().float()
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        gc.collect()
        with torch.no_grad(), region():
            model(x)
        assert len(casts) == 0
        assert attachment.memory() == 2 * WIDTH * (WIDTH + 1)


def test_a_lazy_module_is_held_once_it_has_numbers(casts: Casts) -> None:
    model, x = nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyLinear(WIDTH)), torch.randn(2, WIDTH)
    with precast.attach(model, "torch") as attachment:
        for _ in range(2):
            with torch.no_grad(), region():
                model(x)
        assert len(casts) == 0
        assert attachment.left_alone == {}
        assert attachment.memory() == 2 * 2 * WIDTH * (WIDTH + 1)


def test_other_data_twice_in_a_row_is_seen() -> None:
    # It can bring the first address back, and moves no counter.
    model, x = nn.Linear(256, 256, bias=False), torch.randn(2, 256)
    with precast.attach(model), torch.no_grad():
        for _ in range(20):
            with region():
                model(x)
            model.weight.data = model.weight.data * 2
            model.weight.data = model.weight.data * -2
            with region():
                assert torch.equal(model(x), F.linear(x.to(BF16), model.weight.to(BF16)))
            model.weight.data = model.weight.data / 4


@pytest.mark.parametrize(
    "cut",
    [lambda t: t[:, :WIDTH], lambda t: t[:, :WIDTH].t(), lambda t: t[:1, :WIDTH].expand(WIDTH, -1)],
)
def test_a_parameter_that_is_a_part_of_a_tensor(cut: Callable[[Tensor], Tensor]) -> None:
    ours, theirs = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    whole, x = torch.randn(WIDTH, 2 * WIDTH), torch.randn(2, WIDTH)
    for model in (ours, theirs):
        model.weight = nn.Parameter(cut(whole))
    with precast.attach(ours):
        for _ in range(4):
            assert_same(outcome(ours, x), outcome(theirs, x))
        for model in (ours, theirs):
            with region():
                y = model(x)
            y.float().sum().backward()
        assert ours.weight.grad.stride() == theirs.weight.grad.stride()


class TestEnd:
    """An attachment that has ended holds nothing again."""

    @staticmethod
    def model() -> tuple[nn.Sequential, Attachment]:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        return model, precast.attach(model)

    def test_refreshed(self) -> None:
        _model, attachment = self.model()
        attachment.detach()
        attachment.refresh()
        assert held.held_parameters == {}

    def test_in_a_block_that_writes(self) -> None:
        _model, attachment = self.model()
        with attachment.writing():
            attachment.detach()
        assert held.held_parameters == {}

    def test_before_it_looked_for_what_was_added(self) -> None:
        model, attachment = self.model()
        other = nn.Linear(2, 2)
        with precast.attach(other):
            model.append(nn.Linear(WIDTH, WIDTH))
            attachment.detach()
            with region():
                pass
            assert len(held.held_parameters) == 2

    def test_inside_a_region(self) -> None:
        model, attachment = self.model()
        x = torch.randn(2, WIDTH)
        with region():
            model(x)
            gone = weakref.ref(held.held_parameters[id(model[0].weight)].copies[BF16].tensor)
            attachment.detach()
            assert gone() is None
            assert model(x).dtype is BF16


def test_a_model_that_is_converted_holds_nothing_any_more() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    with precast.attach(model) as attachment:
        with torch.no_grad(), region():
            model(x)
        model.half()
        attachment.refresh()
        assert attachment.memory() == 0
        with torch.no_grad(), region():
            assert model(x).dtype is BF16
        model.float()
        with torch.no_grad(), region():
            assert torch.equal(
                model(x), F.linear(x.bfloat16(), *map(Tensor.bfloat16, model.parameters()))
            )


def test_a_tied_weight_is_held_once() -> None:
    model, x = Net(), tokens()
    with precast.attach(model) as attachment:
        with torch.no_grad(), region():
            model(x)
        once = sum(2 * p.numel() for n, p in model.named_parameters() if "norm" not in n)
        assert attachment.memory() == once


def test_two_attachments_share_the_copies() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH)), torch.randn(2, WIDTH)
    whole, part = precast.attach(model), precast.attach(model[0])
    with torch.no_grad(), region():
        model(x)
    assert whole.memory() == part.memory() == 2 * WIDTH * (WIDTH + 1)
    whole.detach()
    assert part.memory() == 2 * WIDTH * (WIDTH + 1)
    part.detach()
    assert part.memory() == 0


def test_copies_are_in_no_copy_of_the_model() -> None:
    model, x = Net(), tokens()
    names = set(model.state_dict())
    with precast.attach(model):
        with torch.no_grad(), region():
            expected = model(x)
        assert set(model.state_dict()) == names
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        for other in (
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(stream, weights_only=False),
        ):
            assert all(id(p) not in held.held_parameters for p in other.parameters())
            with torch.no_grad(), region():
                assert torch.equal(other(x), expected)


def test_a_model_with_its_attachment_as_an_attribute_can_be_copied() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    model.attachment = precast.attach(model, "torch")
    with torch.no_grad(), region():
        expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.attachment.memory() == 0
        other.attachment.detach()
        with torch.no_grad(), region():
            assert torch.equal(other(x), expected)
    assert model.attachment.memory() == 2 * WIDTH * (WIDTH + 1)
    model.attachment.detach()


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_the_optimizer_renews_each_copy_once(fused: bool) -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    with precast.attach(model):
        for _ in range(3):
            with region():
                loss = model(x).float().sum()
            loss.backward()
            optimizer.step()
            copy = held.held_parameters[id(model.weight)].copies[BF16]
            written = copy.writes
            for _ in range(2):
                with region():
                    model(x)
                assert torch.equal(copy.tensor, model.weight.to(BF16))
                assert copy.writes == written + 1


def test_an_optimizer_that_is_copied_renews_nothing() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with precast.attach(model):
        with torch.no_grad(), region():
            model(x)
        written = held.held_parameters[id(model.weight)].copies[BF16].writes
        for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            other.step()
        assert held.held_parameters[id(model.weight)].copies[BF16].writes == written


class TestGuard:
    """Writes that no version counter sees."""

    @pytest.fixture(autouse=True)
    def in_which_no_thread_writes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(unversioned_writes, "LONGEST_WRITE", 0.0)

    @staticmethod
    def used(*shape: int) -> tuple[nn.Sequential, Attachment]:
        model = nn.Sequential(*(nn.Linear(*shape, bias=False) for _ in range(4)))
        attachment = precast.attach(model)
        with torch.no_grad(), region():
            model(torch.randn(2, shape[0]))
        return model, attachment

    @staticmethod
    def round(comparisons: int) -> None:
        """As many entries as it takes to compare so often; evaluating, as copies for training are renewed anyway."""
        for _ in range(comparisons * unversioned_writes.ENTRIES_BETWEEN_CHECKS):
            with torch.no_grad(), region():
                pass

    def test_the_number_of_entries_is_the_documented_one(self) -> None:
        assert unversioned_writes.ENTRIES_BETWEEN_CHECKS == 8

    @staticmethod
    def use(model: nn.Module, x: Tensor, times: int) -> None:
        for _ in range(times):
            model(x)

    @staticmethod
    def round_of_pytorchs(model: nn.Module, x: Tensor) -> None:
        for _ in range(6 * unversioned_writes.ENTRIES_BETWEEN_CHECKS):
            with torch.autocast("cpu"):
                model(x)

    @pytest.mark.parametrize("number", range(4))
    def test_one_is_found_in_as_many_rounds_as_there_are_parts(self, number: int) -> None:
        model, attachment = self.used(256, 256)
        self.round(3)
        write_unsampled(model[number].weight)
        with pytest.raises(precast.errors.StaleWeightError, match=rf"'{number}.weight'.*writing"):
            self.round(4 * 4)
        with pytest.raises(precast.errors.StaleWeightError):
            self.round(1)
        assert not torch.is_autocast_enabled("cpu")
        attachment.refresh()
        self.round(9)
        attachment.detach()

    def test_where_answers_come_later_one_is_found_one_region_later(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Later(HostCopy):
            looks = 0

            def has_arrived(self) -> bool:
                self.looks += 1
                return self.looks > 1

            def read(self) -> float:
                assert self.looks > 1, "it would wait"
                return super().read()

        original = unversioned_writes._matches

        def agrees_later(*args: Any) -> Tensor:
            agrees = original(*args)
            return torch.tensor(True) if agrees is None else agrees

        monkeypatch.setattr(unversioned_writes, "_matches", agrees_later)
        monkeypatch.setattr(unversioned_writes, "HostCopy", Later)
        model, attachment = self.used(64, 64)
        self.round(8)
        write_unsampled(model[1].weight)
        with pytest.raises(precast.errors.StaleWeightError, match=r"1\.weight"):
            self.round(5)
        with pytest.raises(precast.errors.StaleWeightError):
            self.round(1)
        attachment.refresh()
        self.round(9)
        attachment.detach()

    def test_what_is_seen_is_no_error(self) -> None:
        model, attachment = self.used(64, 64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        model[0].weight.data = torch.full((64, 64), float("nan"))
        with torch.no_grad(), region():
            model(torch.randn(2, 64))
        self.round(8)
        attachment.detach()

    def test_a_nan_that_is_written_unseen_is_found(self) -> None:
        model, attachment = self.used(64, 64)
        write_unsampled(model[1].weight, float("nan"))
        with pytest.raises(precast.errors.StaleWeightError, match=r"1\.weight"):
            self.round(4)
        attachment.detach()

    def test_writing_is_a_block_for_writes_on_purpose(self) -> None:
        model, attachment = self.used(64, 64)
        x = torch.randn(2, 64)
        for parameter in model.parameters():
            with torch.no_grad(), attachment.writing():
                parameter.data.clamp_(-0.01, 0.01)
                with region():
                    inside = model(x)
            with torch.no_grad(), region():
                assert torch.equal(model(x), inside)
        self.round(8)
        attachment.detach()

    @pytest.mark.parametrize("frozen", [False, True])
    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
    def test_writes_on_purpose_are_seen_in_an_open_region(self, frozen: bool, mode: Any) -> None:
        model, x = nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen), torch.randn(2, WIDTH)

        def is_right() -> bool:
            weight, bias = model.weight.detach(), model.bias.detach()
            return torch.equal(model(x), F.linear(x.to(BF16), weight.to(BF16), bias.to(BF16)))

        with precast.attach(model) as attachment, mode(), region():
            assert is_right()
            with attachment.writing():
                for _ in range(3):
                    model.weight.data.mul_(-2)
                    model.bias.data.add_(1)
                    assert is_right()
                    assert is_right()
            assert is_right()
            for _ in range(2):
                model.weight.data.mul_(-2)
                model.bias.data.add_(1)
                attachment.refresh()
                assert is_right()
                assert is_right()

    @pytest.mark.parametrize("kind", registration.ENGINES)
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_a_region_that_is_never_left_finds_it(self, mode: Any, kind: str) -> None:
        model, attachment = self.used(64, 64)
        x = torch.randn(2, 64)
        with registration.use_engine(kind), mode(), region():
            self.use(model, x, 100)
            write_unsampled(model[2].weight)
            with pytest.raises(precast.errors.StaleWeightError, match=r"2\.weight"):
                self.use(model, x, 5 * unversioned_writes.USES_BETWEEN_CHECKS)
            attachment.refresh()
            self.use(model, x, 100)
        attachment.detach()

    def test_regions_of_pytorchs_find_it_while_precast_is_installed(self) -> None:
        model, attachment = self.used(64, 64)
        x = torch.randn(2, 64)
        with precast.install("torch"), torch.no_grad():
            with torch.autocast("cpu"):
                model(x)
            write_unsampled(model[2].weight)
            with pytest.raises(precast.errors.StaleWeightError, match=r"2\.weight"):
                self.round_of_pytorchs(model, x)
            attachment.refresh()
            self.round_of_pytorchs(model, x)
        attachment.detach()


class TestGradients:
    """What arrives at the parameters."""

    @staticmethod
    def linear() -> tuple[nn.Linear, nn.Linear, Tensor]:
        model = nn.Linear(WIDTH, WIDTH)
        return model, copy.deepcopy(model), torch.randn(3, WIDTH)

    def test_regions_of_one_backward_pass_add_theirs_in_float32(self) -> None:
        ours, theirs, x = self.linear()
        with precast.attach(ours):
            for model in (ours, theirs):
                losses = []
                for scale in (1, 3, 1e-3):
                    with region():
                        losses.append(model(x * scale).float().square().sum())
                sum(losses).backward()
            assert_same([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])

    def test_they_are_float32_and_in_the_layout_of_the_parameter(self) -> None:
        for layout in (torch.contiguous_format, torch.channels_last):
            model = nn.Conv2d(64, 64, 3).to(memory_format=layout)
            with precast.attach(model):
                for form in (torch.contiguous_format, torch.channels_last):
                    x = torch.randn(2, 64, 8, 8).to(memory_format=form)
                    with region():
                        y = model(x)
                    (gradient,) = torch.autograd.grad(y.float().sum(), [model.weight])
                    assert gradient.dtype is torch.float32
                    assert gradient.stride() == model.weight.stride()

    def test_a_transposed_gradient_is_laid_out_as_the_parameter(self) -> None:
        model = nn.Linear(130, WIDTH)
        weight = model.weight
        with precast.attach(model), region():
            cast = regions.cache.cast(weight, torch.bfloat16, "cpu")
        incoming = torch.randn(130, WIDTH).bfloat16().t()
        (gradient,) = torch.autograd.grad(cast, [weight], [incoming])
        assert gradient.stride() == weight.stride()
        assert torch.equal(gradient, incoming.float())

    def test_memory_of_a_gradient_is_used_again_once_nobody_has_it(self) -> None:
        ours, _, x = self.linear()

        def gradient() -> Tensor:
            with region():
                y = ours(x)
            y.float().sum().backward()
            assert ours.weight.grad is not None
            return ours.weight.grad

        with precast.attach(ours):
            address = gradient().data_ptr()
            ours.zero_grad()
            kept = gradient()
            assert kept.data_ptr() == address
            numbers = kept.clone()
            view = kept[3]
            ours.zero_grad()
            x = 2 * x
            assert gradient().data_ptr() != address
            assert torch.equal(kept, numbers)
            ours.zero_grad()
            del kept
            gradient()
            assert torch.equal(view, numbers[3])
            before = gradient().clone()
            assert torch.equal(gradient(), before + before / 2), "added to, in place"

    @pytest.mark.parametrize("vmap", [torch.func.vmap, None], ids=["vmap", "is_grads_batched"])
    def test_many_at_once(self, vmap: Any) -> None:
        ours, theirs, x = self.linear()
        found = []
        with precast.attach(ours):
            for model in (ours, theirs):
                with region():
                    y = model(x)
                directions = torch.eye(y.numel(), dtype=y.dtype)[:5].view(5, *y.shape)

                def pulled(direction: Tensor, y: Any = y, model: Any = model) -> tuple[Tensor, ...]:
                    weights = list(model.parameters())
                    return torch.autograd.grad(
                        y, weights, direction, retain_graph=True, is_grads_batched=vmap is None
                    )

                found.append(list((vmap(pulled) if vmap else pulled)(directions)))
        assert_same(*found)

    def test_a_weight_that_got_no_gradient_has_none(self) -> None:
        ours, _, x = self.linear()
        other = nn.Linear(WIDTH, WIDTH)
        with precast.attach(nn.ModuleList([ours, other])):
            with region():
                y, _unused = ours(x), other(x)
            y.float().sum().backward()
        assert ours.weight.grad is not None
        assert other.weight.grad is None

    def test_a_weight_written_between_forward_and_backward_has_the_gradients_of_the_drop_in(
        self,
    ) -> None:
        ours, theirs, x = self.linear()
        found = []
        with precast.attach(ours):
            for model in (ours, theirs):
                x = x.detach().requires_grad_()
                with region():
                    y = model(x).float().square().sum()
                with torch.no_grad():
                    model.weight.mul_(2)
                with region():
                    again = model(x).float().sum()
                found.append(list(torch.autograd.grad(y + again, [x, *model.parameters()])))
        assert_same(*found)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpoints(self, reentrant: bool) -> None:
        from torch.utils.checkpoint import checkpoint

        ours, theirs, x = self.linear()
        x.requires_grad_()
        found = []
        with precast.attach(ours):
            for model in (ours, theirs):
                with region():
                    y = checkpoint(model, x, use_reentrant=reentrant)
                y.float().square().sum().backward()
                found.append([p.grad for p in model.parameters()])
        assert_same(*found)

    def test_transforms(self) -> None:
        ours, theirs, x = self.linear()
        found = []
        with precast.attach(ours):
            for model in (ours, theirs):

                def loss(state: dict[str, Tensor], row: Tensor, model: nn.Module = model) -> Tensor:
                    with region():
                        y: Tensor = torch.func.functional_call(model, state, (row,))
                    return y.float().square().sum()

                state = {n: p.detach() for n, p in model.named_parameters()}
                each = torch.func.vmap(torch.func.grad(loss), (None, 0))(state, x)
                found.append(list(each.values()))
        assert_same(*found)


def test_detaching_ends_what_other_threads_keep() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    attachment = precast.attach(model)
    ready, go = threading.Event(), threading.Event()
    results: list[Tensor] = []

    def work() -> None:
        with torch.no_grad(), region():
            model(x)
        ready.set()
        assert go.wait(30)
        with torch.no_grad(), region():
            results.append(model(x))

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(30)
    gone = [weakref.ref(c.tensor) for h in held.held_parameters.values() for c in h.copies.values()]
    attachment.detach()
    model.weight.data.zero_()
    gc.collect()
    assert [tensor() for tensor in gone] == [None, None]
    go.set()
    thread.join()
    assert torch.equal(results[0], model.bias.detach().bfloat16().expand(2, -1))


def test_an_attachment_ends_with_its_model() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    gone = weakref.ref(model)
    attachment = precast.attach(model)
    outcome(model, torch.randn(2, WIDTH))
    del model
    gc.collect()
    assert gone() is None
    assert attachment.memory() == 0
    attachment.refresh()


def test_without_holding_nothing_is_held() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    with precast.attach(model, hold=False) as attachment:
        outcome(model, x)
        assert attachment.memory() == 0
        assert held.held_parameters == {}


def test_what_cannot_be_held_is_named_with_the_reason() -> None:
    model = nn.Module()
    model.usual = nn.Parameter(torch.ones(2))
    model.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model.narrow = nn.Parameter(torch.ones(2, dtype=torch.float16))
    model.meta = nn.Parameter(torch.ones(2, device="meta"))
    model.tagged = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
    with torch.inference_mode():
        model.uncounted = nn.Parameter(torch.ones(2), requires_grad=False)
    with precast.attach(model) as attachment:
        reasons = attachment.left_alone
        assert set(reasons) == {"wide", "narrow", "meta", "tagged", "uncounted"}
        assert "float64" in reasons["wide"]
        assert "TwoTensor" in reasons["tagged"]
        assert "inference mode" in reasons["uncounted"]
        assert repr(attachment) == "<Attachment of Module: 1 parameter held, 5 left alone>"


def test_attach_refuses_an_argument_that_is_not_a_module() -> None:
    with pytest.raises(precast.errors.AttachError, match="got list"):
        precast.attach([nn.Linear(2, 2)])  # type: ignore[arg-type]


@pytest.mark.parametrize("scripted", [False, True], ids=["compiled", "scripted"])
def test_compiled_and_scripted_models_compute_the_same(scripted: bool) -> None:
    ours, theirs = pair()
    x = tokens()
    made: list[Any] = [
        torch.jit.trace(model, (x,)) if scripted else torch.compile(model, backend="aot_eager")
        for model in (ours, theirs)
    ]
    with precast.attach(ours):
        for _ in range(3):
            with torch.no_grad(), region():
                assert torch.equal(made[0](x), made[1](x))
            with torch.no_grad():
                for model in (ours, theirs):
                    model.twice.weight.mul_(0.5)


class TestPolicy:
    """A policy for the model: its tables and its rules for modules."""

    @staticmethod
    def network() -> tuple[nn.Sequential, Tensor]:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(2, 8)

    @pytest.mark.parametrize("region", [torch.autocast, precast.autocast])
    @pytest.mark.parametrize("compiled", [False, True])
    def test_its_tables_hold_inside_the_model_alone(self, region: Any, compiled: bool) -> None:
        model, x = self.network()
        policy = precast.Policy.load("torch").replace(ops={"linear": "fp32"})
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        with precast.attach(model, policy):
            with region("cpu"):
                assert call(x).dtype is torch.float32
                assert F.linear(x, x).dtype is BF16
            assert torch.equal(
                call(x),
                F.linear(F.relu(F.linear(x, *model[0].parameters())), *model[2].parameters()),
            )
        with region("cpu"):
            assert call(x).dtype is BF16

    def test_a_preset_and_a_file_go_by_name(self, tmp_path: Path) -> None:
        model, x = self.network()
        file = tmp_path / "careful.toml"
        file.write_text('base = "default"\n[modules]\n"*" = "fp32"\n')
        for policy, dtype in (("torch", BF16), (str(file), torch.float32), (file, torch.float32)):
            with precast.attach(model, policy), precast.autocast("cpu"):
                assert model(x).dtype is dtype

    def test_a_pattern_that_matches_nothing_is_said(self) -> None:
        model, _ = self.network()
        policy = precast.Policy.load("default").replace(modules={"head": "fp32"})
        with pytest.warns(precast.errors.PrecastWarning, match="'head' matches no module"):
            precast.attach(model, policy).detach()

    def test_what_cannot_be_carried_out_leaves_no_trace(self) -> None:
        model, _ = self.network()
        policy = precast.Policy.load("default").replace(modules={"2": "fp32"})
        with precast.attach(model, policy):
            with pytest.raises(precast.errors.PolicyError, match="another attachment"):
                precast.attach(model, policy)
            assert len(held.attached) == 1


@pytest.mark.usefixtures("_no_trace")
def test_no_function_mode_hears_what_is_done_for_held_weights() -> None:
    heard: list[str] = []

    class Listener(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            heard.append(func.__name__)
            return func(*args, **(kwargs or {}))

    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    calls = []
    for attached in (False, True):
        with precast.attach(model) if attached else nullcontext():
            for mode in (torch.no_grad, torch.enable_grad):
                for _ in range(2):
                    heard.clear()
                    with mode(), Listener(), region():
                        F.linear(x, model.weight, model.bias)
                    calls.append(list(heard))
    assert calls[:4] == calls[4:]
    assert "linear" in calls[0]


@pytest.mark.parametrize("before", [0, 1], ids=["found by the first", "found by another"])
def test_a_stale_weight_opens_no_region_of_those_entered_as_one(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        unversioned_writes, "ENTRIES_BETWEEN_CHECKS", 1
    )  # which entry finds it is given here
    # A weight that is trained would be copied again for training.
    model, x = nn.Linear(WIDTH, WIDTH).requires_grad_(False), torch.randn(2, WIDTH)
    with precast.attach(model) as attachment:
        with torch.no_grad(), precast.autocast("hpu", dtype=BF16), region():
            model(x)
            here = precast.current_precision()
        for _ in range(before):
            with region():
                pass
        write_unsampled(model.bias)
        for _ in range(3):
            with pytest.raises(precast.errors.StaleWeightError), here, here:
                pytest.fail("entered")
            assert not precast.engine.thread_state.regions.records
            assert not torch.is_autocast_enabled("cpu")
        attachment.refresh()
        with here:
            assert model(x).dtype is BF16
    assert not torch.is_autocast_enabled("hpu")


def test_backward_of_another_model_is_compiled_while_one_is_attached() -> None:
    """The compiler makes modules while it traces, and what attachments hear of modules is none of its business."""
    attached, model, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(2, 4)

    def step() -> None:
        model(x).sum().backward()

    with precast.attach(attached), torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="eager")()
    torch.compiler.reset()
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, x.sum(0).expand(4, 4))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda weight: weight.t(),
    "rows": lambda weight: weight[8:40],
    "a third": lambda weight: weight.chunk(3)[1],
    "rows, transposed": lambda weight: weight[8:40].t(),
    "columns": lambda weight: weight[:, 8:40],
    "flat and back": lambda weight: weight.view(-1).view(WIDTH, WIDTH),
    "every second row": lambda weight: weight[::2],
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_held_weight_is_as_if_it_were_cast(name: str, mode: Any, casts: Casts) -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)

    def product(region: Any) -> Tensor:
        with region, mode():
            view = VIEWS[name](model.weight)
            return torch.mm(x[:, : view.shape[0]], view)

    with precast.attach(model):
        for write in (model.weight.zero_, model.weight.normal_, lambda: None):
            with torch.no_grad():
                write()
            assert torch.equal(product(region()), product(torch.autocast("cpu", BF16)))
    assert len(casts) == 0


def test_a_view_that_is_older_than_the_data_of_its_weight_is_cast_itself() -> None:
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.ones(1, WIDTH)
    with precast.attach(model), torch.no_grad():
        view = model.weight.t()
        expected = torch.mm(x.bfloat16(), view.bfloat16())
        model.weight.data = torch.zeros(WIDTH, WIDTH)
        for _ in range(2):
            with region():
                assert torch.equal(torch.mm(x, view), expected)
                assert model(x).abs().sum() == 0


KEEPERS: dict[str, Callable[[Tensor], Any]] = {
    "storage": lambda gradient: gradient.untyped_storage(),
    "data": lambda gradient: gradient.data,
    "detached": lambda gradient: gradient.detach(),
    "array": lambda gradient: gradient.numpy(),
    "capsule": torch.utils.dlpack.to_dlpack,
    "view": lambda gradient: gradient.view(-1),
}
READ: dict[str, Callable[[Any], Tensor]] = {
    "storage": lambda kept: torch.tensor([], dtype=torch.float32).set_(kept),
    "array": torch.from_numpy,
    "capsule": torch.utils.dlpack.from_dlpack,
}


@pytest.mark.parametrize("name", KEEPERS)
def test_a_gradient_that_the_program_keeps_is_never_written(name: str) -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)

    def backward(scale: float) -> Tensor:
        model.weight.grad = None
        with region():
            (model(torch.ones(2, WIDTH)).float().sum() * scale).backward()
        assert model.weight.grad is not None
        return model.weight.grad

    with precast.attach(model):
        backward(1.0)
        kept, expected = KEEPERS[name](backward(2.0)), backward(2.0).clone()
        for scale in (4.0, 8.0, 16.0):
            backward(scale)
        assert torch.equal(READ.get(name, Tensor.clone)(kept).reshape(-1), expected.reshape(-1))
