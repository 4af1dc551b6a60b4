"""The advice of a report, followed on programs that have the fault."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast._internal import cures
from precast.running import machine_speed
from tests.support.reports import seen, summary_of

F16, BF16 = torch.float16, torch.bfloat16


class Training:
    """A program that trains a model in a region."""

    def __init__(
        self,
        model: Callable[[], nn.Module],
        dtype: torch.dtype | None = F16,
        *,
        steps: int = 12,
        batch: Callable[[int], Tensor] = lambda _: torch.randn(8, 4),
        loss: Callable[[Tensor], Tensor] = lambda y: y.float().square().mean(),
        optimizer: Callable[..., Any] = lambda p: torch.optim.SGD(p, lr=1e-3),
        scaler: Callable[[], Any] = lambda: None,
    ) -> None:
        self.model, self.dtype, self.steps, self.batch = model, dtype, steps, batch
        self.loss, self.optimizer, self.scaler = loss, optimizer, scaler

    def __call__(self) -> None:
        torch.manual_seed(0)
        model = self.model()
        optimizer, scaler = self.optimizer(model.parameters()), self.scaler()
        for step in range(self.steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
                loss = self.loss(model(self.batch(step)))
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()


def torchs(scale: float, interval: int = 1000) -> Callable[[], Any]:
    """A maker of PyTorch's scaler."""
    return lambda: torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)


def advice(program: Training, **options: Any) -> tuple[str, Any]:
    """The text of the first advice on a program, and its document."""
    made = seen(program, health=options.pop("health", True), **options)
    first = summary_of(made)["first"]
    return first["text"] if first else "", made


def is_well(program: Training, **options: Any) -> bool:
    """Whether a program loses no step and has no numeric finding."""
    made = seen(program, health=True, **options)
    lost = made["run"]["skipped"] + made["run"]["nonfinite_losses"]
    return not lost and not made["findings"]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def ones() -> nn.Module:
    layer = nn.Linear(4, 4)
    nn.init.ones_(layer.weight)
    return layer


class Between(nn.Module):
    """Two layers with code between them."""

    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.code = nn.Linear(4, 8), nn.Linear(8, 1), code

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.code(self.a(x)))
        return out


class Root(nn.Module):
    """A layer whose output is the root of squares, plus a number."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.layer, self.eps = nn.Linear(4, 4), eps

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).float() * 0 + self.eps).sqrt()


class Divides(nn.Module):
    """A layer whose output is divided by a number."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.layer, self.by = nn.Linear(4, 4), by

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * 0 / self.by
        return out


# --- overflows ---


@pytest.mark.trial("OWN_CAST")
def test_a_cast_by_the_program_has_to_go() -> None:
    def model(cast: bool) -> Callable[[], nn.Module]:
        return lambda: Between(lambda x: (x.float() * 1e5).half() if cast else x.float() * 1e5)

    def train(*, cast: bool) -> Training:
        how = {"loss": lambda y: y.float().mean() * 1e-9, "scaler": torchs(16.0)}
        return Training(model(cast), F16 if cast else BF16, **how)

    text, _ = advice(train(cast=True))
    assert cures.OWN_CAST() in text
    assert is_well(train(cast=False))


@pytest.mark.trial("NAN_IN_FLOAT32")
def test_what_is_nan_in_float32_too_is_a_division() -> None:
    def train(by: float, dtype: torch.dtype | None = F16) -> Training:
        return Training(
            lambda: nn.Sequential(Divides(by), nn.Linear(4, 1)), dtype, scaler=torchs(16.0)
        )

    text, _ = advice(train(0.0))
    assert cures.NAN_IN_FLOAT32() in text
    assert not is_well(train(0.0, None)), "the format is not the reason"
    assert is_well(train(1.0))


class Whole(nn.Module):
    """A model that overflows float16 in its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * 1e5)


@pytest.mark.trial("IN_BFLOAT16")
def test_a_model_that_overflows_runs_in_bfloat16() -> None:
    def train(dtype: torch.dtype) -> Training:
        return Training(
            Whole, dtype, scaler=torchs(2.0), optimizer=lambda p: torch.optim.SGD(p, 1e-12)
        )

    text, _ = advice(train(F16))
    assert text == cures.IN_BFLOAT16()
    assert is_well(train(BF16))


@pytest.mark.trial("STORE_IN_BFLOAT16")
def test_a_model_in_float16_is_stored_in_bfloat16() -> None:
    def train(dtype: torch.dtype) -> Training:
        return Training(
            lambda: ones().to(dtype),
            dtype,
            batch=lambda _: torch.full((8, 4), 60000.0, dtype=dtype),
            loss=lambda y: y.float().abs().mean() * 1e-9,
        )

    text, made = advice(train(F16))
    assert text.startswith("Store the model in bfloat16 or in float32"), text
    assert summary_of(made)["first"]["policy"] is None
    made = seen(train(BF16), health=True)
    assert made["run"]["nonfinite_losses"] == 0
    assert made["health"]["first"] is None


@pytest.mark.trial("SMALL_EPS")
def test_parameters_stay_in_float32_where_eps_is_zero_in_float16() -> None:
    def train(of: torch.dtype) -> Training:
        return Training(
            lambda: plain().to(of),
            batch=lambda _: torch.randn(8, 4, dtype=of),
            optimizer=lambda p: torch.optim.Adam(p, lr=1e-3),
        )

    text, made = advice(train(F16))
    assert text == cures.SMALL_EPS(eps=1e-8, optimizer="Adam")
    assert "Adam's step before wrote that" in made["health"]["first"]["message"]
    assert summary_of(made)["first"]["policy"] is None
    assert is_well(train(torch.float32))


@pytest.mark.trial("BAD_STEP")
def test_the_learning_rate_is_at_fault_where_a_step_wrote_nan() -> None:
    def train(lr: float) -> Training:
        return Training(plain, BF16, optimizer=lambda p: torch.optim.SGD(p, lr=lr))

    text, made = advice(train(1e38))
    assert text.startswith("Look at the step before"), (text, made["health"]["first"])
    assert is_well(train(1e-3))


class Average(nn.Module):
    """A layer divided by a moving average that forward updates."""

    def __init__(self, *, finite_only: bool) -> None:
        super().__init__()
        self.finite_only = finite_only
        self.register_buffer("size", torch.ones(4))

    size: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            new = self.size * 0.9 + 0.1 * (x - x.mean()).float().abs().mean(0)
            self.size.copy_(
                torch.where(new.isfinite(), new, self.size) if self.finite_only else new
            )
        return x / self.size


@pytest.mark.trial("BAD_BUFFER")
def test_forward_writes_only_what_is_finite_to_a_buffer() -> None:
    def train(*, finite_only: bool, bad: bool = True) -> Training:
        return Training(
            lambda: nn.Sequential(
                nn.Linear(4, 4), Average(finite_only=finite_only), nn.Linear(4, 1)
            ),
            batch=lambda step: torch.randn(8, 4) * (1e6 if step == 3 and bad else 1),
            scaler=torchs(16.0),
        )

    made = seen(train(finite_only=False), health=True)
    assert made["run"]["skipped"] == 9, "all steps from the bad one on"
    state = next(
        s["first"]["state"] for s in made["steps"] if s["first"] and s["first"].get("state")
    )
    assert (state["name"], state["kind"]) == ("1.size", "buffer")
    made["health"]["first"] = made["steps"][-1]["first"]
    made["steps"] = made["steps"][-1:]
    text = summary_of(made | {"findings": []})["first"]["text"]
    assert text == cures.BAD_BUFFER(tensor="1.size")
    assert seen(train(finite_only=True), health=True)["run"]["skipped"] == 1


# --- gradients, and the scale ---


@pytest.mark.trial("LEAVE_IT")
def test_a_skipped_step_that_later_steps_overcome_is_left() -> None:
    steps = itertools.count()

    def loss(y: Tensor) -> Tensor:
        return y.float().sum() * (1e4 if next(steps) == 15 else 1e-3)

    text, made = advice(Training(plain, steps=20, scaler=torchs(2.0**10), loss=loss))
    assert text == cures.LEAVE_IT(), text
    assert [step["step"] for step in made["steps"] if step["skipped"]] == [15]


def sums(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda y: y.float().sum() * factor


@pytest.mark.trial("FIND_SCALE")
def test_the_scaler_finds_the_scale() -> None:
    def train(scaler: Callable[[], Any]) -> Training:
        return Training(
            plain,
            steps=12,
            loss=sums(100),
            scaler=scaler,
            optimizer=lambda p: torch.optim.SGD(p, 1e-9),
        )

    text, before = advice(train(torchs(2.0**20)))
    assert text.startswith("Let the scaler find the scale"), text
    after = seen(train(lambda: precast.GradScaler("cpu", init_scale="auto")), health=True)
    assert before["run"]["skipped"] > 5
    assert after["run"]["skipped"] <= 1


@pytest.mark.trial("LOW_SCALE")
def test_a_root_of_zero_is_at_fault_where_the_scale_is_low() -> None:
    def train(eps: float) -> Training:
        return Training(lambda: Root(eps), scaler=torchs(1.0), loss=lambda y: y.float().mean())

    text, _ = advice(train(0.0))
    assert text.startswith("Look at the gradients of"), text
    assert is_well(train(1e-3))


@pytest.mark.trial("BAD_LOSS")
@pytest.mark.parametrize("scaler", [torchs(16.0), lambda: None])
def test_the_logarithm_in_the_loss_is_at_fault(scaler: Callable[[], Any]) -> None:
    def train(least: float) -> Training:
        return Training(
            plain, BF16, loss=lambda y: (y.float() * 0 + least).log().mean(), scaler=scaler
        )

    text, made = advice(train(0.0))
    assert text == cures.BAD_LOSS(), text
    assert made["run"]["skipped_losses"] + made["run"]["nonfinite_losses"] == 12
    assert is_well(train(1.0))


@pytest.mark.trial("SCALE_THE_LOSS")
def test_a_scaled_loss_keeps_small_gradients() -> None:
    def train(scaler: Callable[[], Any], dtype: torch.dtype = F16) -> Training:
        return Training(plain, dtype, loss=sums(1e-7), scaler=scaler)

    text, _ = advice(train(lambda: None))
    assert text == cures.SCALE_THE_LOSS(), text
    assert is_well(train(lambda: precast.GradScaler("cpu")))
    assert is_well(train(lambda: None, BF16))


@pytest.mark.trial("RAISE_THE_SCALE")
def test_a_scale_that_is_found_keeps_small_gradients() -> None:
    def train(scaler: Callable[[], Any]) -> Training:
        return Training(plain, loss=sums(1e-7), scaler=scaler)

    text, _ = advice(train(torchs(1.0)))
    assert text == cures.RAISE_THE_SCALE(), text
    made = seen(train(lambda: precast.GradScaler("cpu", init_scale="auto")), health=True)
    lost = [
        sum(m["underflow_zeros"][1:]) for m in made["health"]["modules"] if m["kind"] == "parameter"
    ]
    assert sum(lost) == 0, "after the first step, which finds the scale"


# --- formats with float32's range ---


@pytest.mark.trial("BEYOND_FLOAT32")
def test_a_division_is_at_fault_in_bfloat16() -> None:
    def train(by: float) -> Training:
        return Training(lambda: nn.Sequential(Divides(by), nn.Linear(4, 1)), BF16)

    text, _ = advice(train(0.0))
    assert "at what it divides by" in text
    assert is_well(train(1.0))


@pytest.mark.trial("LINES_BEYOND_FLOAT32")
def test_a_division_in_a_line_is_at_fault_in_bfloat16() -> None:
    def train(by: float) -> Training:
        return Training(lambda: Between(lambda x: x * 0 / by), BF16)

    text, _ = advice(train(0.0), steps=(1, 3))
    assert text.startswith(cures.LINES_BEYOND_FLOAT32()), text
    assert is_well(train(1.0))


@pytest.mark.trial("LOOK_AT_DATA")
def test_the_data_is_at_fault() -> None:
    def train(bad: float) -> Training:
        return Training(
            plain, BF16, batch=lambda step: torch.randn(8, 4) * (bad if step == 3 else 1.0)
        )

    text, _ = advice(train(float("nan")))
    assert text == cures.LOOK_AT_DATA()
    assert is_well(train(1.0))


# --- updates ---


@pytest.mark.trial("KEEP_MASTERS")
@pytest.mark.trial("LEARN_IN_16_BITS")
def test_float32_masters_and_compensated_steps_keep_updates() -> None:
    def program(of: torch.dtype, kahan: bool) -> Callable[[], float]:
        def train() -> float:
            torch.manual_seed(0)
            model = nn.Linear(8, 1, bias=False)
            nn.init.ones_(model.weight)
            model.to(of)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            if kahan:
                precast.optim.bfloat16_weights(model, optimizer)
            for _ in range(200):
                optimizer.zero_grad()
                with torch.autocast("cpu", BF16):
                    loss = model(torch.ones(4, 8, dtype=of)).float().mean()
                loss.backward()
                optimizer.step()
            return float(loss.detach())

        return train

    made = seen(program(BF16, False), health=True)
    text = summary_of(made)["first"]["text"]
    assert text.startswith(cures.KEEP_MASTERS()), text
    assert "bfloat16_weights" in text
    assert program(BF16, False)() == 8.0, "nothing is learnt"
    for of, kahan in ((torch.float32, False), (BF16, True)):
        assert program(of, kahan)() < 8.0


class Stuck:
    """A program with Adam whose gradients are large at first and small later."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self) -> None:
        torch.manual_seed(0)
        model = nn.Linear(64, 8, bias=False).to(self.dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", BF16):
                loss = model(torch.ones(4, 64, dtype=self.dtype)).float().sum()
            (loss * (8.0 if step == 0 else 0.01)).backward()
            optimizer.step()


def suggestions(made: Any, kind: str) -> list[str]:
    return [finding["suggestion"] for finding in made["findings"] if finding["kind"] == kind]


@pytest.mark.trial("KEEP_STATES")
def test_states_of_a_float32_model_can_decay() -> None:
    made = seen(Stuck(BF16), health=True)
    assert suggestions(made, "state rounded away") == [cures.KEEP_STATES()]
    assert suggestions(seen(Stuck(torch.float32), health=True), "state rounded away") == []


@pytest.mark.trial("KEEP_AVERAGE")
def test_an_average_in_float32_follows() -> None:
    def program(*, in_float32: bool) -> Callable[[], None]:
        def train() -> None:
            torch.manual_seed(0)
            model = nn.Linear(64, 8, bias=False)
            average = copy.deepcopy(model).to(torch.float32 if in_float32 else BF16)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(6):
                optimizer.zero_grad()
                with torch.autocast("cpu", BF16):
                    loss = model(torch.randn(4, 64)).float().square().mean()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    average.weight.mul_(0.9995).add_(model.weight.to(average.weight), alpha=0.0005)

        return train

    made = seen(program(in_float32=False), health=True)
    assert suggestions(made, "average rounded away") == [cures.KEEP_AVERAGE()]
    assert suggestions(seen(program(in_float32=True), health=True), "average rounded away") == []


# --- what is not finite at the end ---


@pytest.mark.trial("BROKEN_AT_THE_END")
def test_the_learning_rate_is_at_fault_where_the_last_step_wrote_infinity() -> None:
    def train(lr: float) -> Training:  # its model is freed before the run ends
        return Training(plain, BF16, optimizer=lambda p: torch.optim.SGD(p, lr=lr), steps=1)

    text, made = advice(train(float("inf")))
    assert made["run"]["nonfinite"][0]["kind"] == "parameter"
    assert text == cures.BROKEN_AT_THE_END(), text
    assert not seen(train(1e-3), health=True)["run"]["nonfinite"]


@pytest.mark.trial("RESTORE_BUFFERS")
def test_a_scaler_that_restores_buffers_leaves_none_that_is_not_finite() -> None:
    models = []

    def model() -> nn.Module:
        models.append(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
        return models[-1]

    def train(scaler: Callable[[], Any]) -> Training:
        return Training(
            model, batch=lambda step: torch.randn(8, 4) * (1e6 if step == 3 else 1), scaler=scaler
        )

    made = seen(train(torchs(16.0)), health=True)
    assert {state["kind"] for state in made["run"]["nonfinite"]} == {"buffer"}
    made["steps"], made["findings"], made["health"]["first"] = [], [], None
    made["run"]["skipped"] = 0
    assert summary_of(made)["first"]["text"] == cures.RESTORE_BUFFERS()

    def restoring() -> Any:
        return precast.GradScaler("cpu", init_scale=16.0, restore_buffers=models[-1])

    made = seen(train(restoring), health=True)
    assert made["run"]["skipped"] == 1
    assert made["run"]["nonfinite"] == []


@pytest.mark.trial("FASTER_DTYPE")
@pytest.mark.parametrize(("speed", "instead"), [(2.0, F16), (0.1, None)])
def test_another_dtype_is_not_emulated(
    monkeypatch: pytest.MonkeyPatch, speed: float, instead: torch.dtype | None
) -> None:
    speeds = {"bfloat16": 0.2, "float16": speed}
    monkeypatch.setattr(machine_speed, "matmul_speed", lambda _, dtype: speeds[dtype])
    text, made = advice(Training(plain, BF16), measures=True)
    name = "float16 (`dtype=torch.float16`)" if instead else "float32"
    assert text == cures.FASTER_DTYPE(instead=name, dtype="bfloat16")
    assert "makes this run slower" in summary_of(made)["headline"]
    made = seen(Training(plain, instead), health=True, measures=True)
    assert "makes this run slower" not in summary_of(made)["headline"]


# --- where nothing is known to be wrong ---


@pytest.mark.trial("WATCH_NUMBERS")
def test_health_names_what_overflows() -> None:
    train = Training(plain, loss=sums(100), scaler=torchs(2.0**20), steps=4)
    text, _ = advice(train, health=False)
    assert text == cures.WATCH_NUMBERS(happens="overflows")
    assert seen(train, health=True)["health"]["first"]["name"]


@pytest.mark.trial("COMPARE_TIMES")
def test_what_takes_time_with_casts_can_be_compared() -> None:
    made = seen(Training(plain, BF16))
    made["trace"]["totals"] |= {"cast_seconds": 0.9, "seconds": 1.0}
    made["trace"]["findings"] = []
    assert summary_of(made)["first"]["text"] == cures.COMPARE_TIMES()
    assert not seen(Training(plain, None))["trace"]["totals"]["casts"], "with `enabled=False`"


@pytest.mark.trial("START_FROM_A_BASE")
def test_a_policy_with_a_base_gives_16_bits(tmp_path: Path) -> None:
    policy = tmp_path / "mine.toml"
    policy.write_text('[ops.cpu]\nlinear = "fp32"\n')
    text, _ = advice(Training(plain, BF16), health=False, policy=str(policy))
    assert text == cures.START_FROM_A_BASE()
    policy.write_text('base = "default"\n')
    text, made = advice(Training(plain, BF16), health=False, policy=str(policy))
    assert cures.START_FROM_A_BASE() not in text
    assert "bfloat16" in {dtype for row in made["trace"]["rows"] for dtype in row["output"]}


@pytest.mark.trial("OPEN_A_REGION")
def test_a_region_gives_16_bits() -> None:
    def in_region() -> None:
        model = plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(6):
            optimizer.zero_grad()
            with precast.autocast("cpu"):
                loss = model(torch.randn(8, 4)).float().square().mean()
            loss.backward()
            optimizer.step()

    text, _ = advice(Training(plain, None), health=False)
    assert text == cures.OPEN_A_REGION(device="cpu")
    made = seen(in_region)
    assert summary_of(made)["headline"].startswith("Mixed precision")
