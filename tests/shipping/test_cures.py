"""The advice in the errors of convert, load and export, followed on programs that have the fault."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast._internal import cures
from precast._internal.cures import Cure
from precast.errors import ConversionError, ExportError, PrecastError

X = torch.linspace(-1, 1, 16).reshape(2, 8)


class Regularized(nn.Linear):
    """Uses its weight in float32 for some inputs only."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.weight.norm() if x.mean() > 1 else y


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("this module holds a connection")


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 8).eval()


def in_region(model: nn.Module, x: Tensor = X) -> Tensor:
    with torch.no_grad(), precast.autocast("cpu", policy="default"):
        result: Tensor = model(x)
    return result


@contextlib.contextmanager
def advises(cure: Cure, error: type[PrecastError], **values: object) -> Iterator[None]:
    """Expect an error with the text of a cure."""
    with pytest.raises(error) as raised:
        yield
    assert cure(**values) in str(raised.value)


def is_converted_like(converted: nn.Module, model: nn.Module) -> bool:
    return torch.equal(converted(X), in_region(model))


# --- convert ---


@pytest.mark.trial("CONVERT_EVAL")
def test_a_model_in_training_mode_is_set_to_evaluation() -> None:
    model = linear().train()
    with advises(cures.CONVERT_EVAL, ConversionError):
        precast.convert(model, example=X)
    model.eval()
    assert is_converted_like(precast.convert(model, example=X), model)


@pytest.mark.trial("CONVERT_FLOAT32")
def test_a_converted_model_is_converted_from_its_float32_model() -> None:
    model = linear()
    converted = precast.convert(model, example=X)
    with advises(cures.CONVERT_FLOAT32, ConversionError):
        precast.convert(converted, dtype=torch.float16, example=X)
    assert precast.convert(model, dtype=torch.float16, example=X)(X).dtype is torch.float16


@pytest.mark.trial("CONVERT_UNSCRIPTED")
def test_the_source_of_a_scripted_model_is_converted() -> None:
    model = linear()
    with advises(cures.CONVERT_UNSCRIPTED, ConversionError):
        precast.convert(torch.jit.script(model), example=X)
    assert is_converted_like(precast.convert(model, example=X), model)


@pytest.mark.trial("CONVERT_INSIDE")
def test_the_model_inside_a_wrapper_is_converted_then_wrapped() -> None:
    model = linear()
    with advises(cures.CONVERT_INSIDE, ConversionError):
        precast.convert(nn.DataParallel(model).eval(), example=X)
    wrapped = nn.DataParallel(precast.convert(model, example=X)).eval()
    assert torch.equal(wrapped(X), in_region(model))


@pytest.mark.trial("CONVERT_META")
def test_load_gives_a_model_on_the_meta_device_its_values(tmp_path: Path) -> None:
    model = linear()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    on_meta = nn.Linear(8, 8, device="meta").eval()
    with advises(cures.CONVERT_META, ConversionError):
        precast.convert(on_meta, example=X)
    loaded = precast.load_converted(on_meta, tmp_path / "model.pt", example=X)
    assert is_converted_like(loaded, model)


@pytest.mark.trial("CONVERT_DEVICE")
def test_a_policy_without_rules_for_the_device_gets_some() -> None:
    model = linear()
    tables = {"cuda": precast.Policy.load("default").tables["cuda"]}
    policy = precast.Policy("only-cuda", tables)
    with advises(cures.CONVERT_DEVICE, ConversionError):
        precast.convert(model, policy, example=X)
    assert precast.convert(model, policy.retarget("cpu"), example=X)(X).dtype is torch.bfloat16


@pytest.mark.trial("CONVERT_IN_PLACE")
def test_a_model_that_cannot_be_copied_is_converted_in_place() -> None:
    model = Uncopyable(8, 8).eval()
    expected = in_region(model)
    with advises(cures.CONVERT_IN_PLACE, ConversionError):
        precast.convert(model, example=X)
    assert torch.equal(precast.convert(model, example=X, in_place=True)(X), expected)


@pytest.mark.trial("CONVERT_ARGUMENTS")
def test_an_example_that_fails_is_replaced_by_the_arguments_of_a_call() -> None:
    class OfSum(nn.Linear):
        def forward(self, one: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(one + other)

    model = OfSum(8, 8).eval()
    with advises(cures.CONVERT_ARGUMENTS, ConversionError):
        precast.convert(model, example=X)
    named = {"one": X, "other": X}
    for example in ((X, X), named, [(X, X), named]):
        assert precast.convert(model, example=example)(X, X).dtype is torch.bfloat16


@pytest.mark.trial("CONVERT_PATH")
def test_an_example_of_another_path_keeps_its_weights_in_float32() -> None:
    model = Regularized(8, 8).eval()
    with advises(cures.CONVERT_PATH, ConversionError):
        precast.convert(model, example=X)(X + 3)
    converted = precast.convert(model, example=[X, X + 3])
    assert torch.equal(converted(X + 3), in_region(model, X + 3))


@pytest.mark.trial("CONVERT_FUNC")
def test_transforms_of_torch_func_take_the_float32_model() -> None:
    model = linear()
    converted = precast.convert(model, example=X)
    with advises(cures.CONVERT_FUNC, ConversionError):
        torch.func.vmap(converted)(X)
    with torch.no_grad(), precast.autocast("cpu"):
        result = torch.func.vmap(model)(X)  # in float32: the transform decomposes the operation
        torch.testing.assert_close(result, model(X).float(), rtol=0.02, atol=0.01)


@pytest.mark.trial("CONVERT_INFERENCE")
def test_a_converted_model_runs_in_evaluation_mode_and_trains_in_float32() -> None:
    model = linear()
    converted = precast.convert(model, example=X)
    converted.train()
    with advises(cures.CONVERT_INFERENCE, ConversionError):
        converted(X)
    assert is_converted_like(converted.eval(), model)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1.0)
    with precast.autocast("cpu"):
        model(X).sum().backward()
    optimizer.step()
    assert is_converted_like(precast.convert(model.eval(), example=X), model)


@pytest.mark.trial("CONVERT_TRACE")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_converted_model_is_traced_and_its_model_exported() -> None:
    model = linear()
    converted = precast.convert(model, example=X)
    with advises(cures.CONVERT_TRACE, ConversionError):
        torch.jit.script(converted)
    expected = in_region(model)
    assert torch.equal(torch.jit.trace(converted, X)(X), expected)
    assert torch.equal(precast.export(model, (X,)).module()(X), expected)


# --- load ---


@pytest.mark.trial("LOAD_FUNCTION")
def test_the_function_creates_buffers_that_no_state_dict_has(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("scale", torch.tensor(2.0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    model = Scaled().eval()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        on_meta = Scaled()
    on_meta.to_empty(device="meta")
    with advises(cures.LOAD_FUNCTION, ConversionError):
        precast.load_converted(on_meta.to("meta"), tmp_path / "model.pt", example=X)
    assert is_converted_like(
        precast.load_converted(Scaled, tmp_path / "model.pt", example=X), model
    )


@pytest.mark.trial("LOAD_EXAMPLE")
def test_a_float32_checkpoint_is_loaded_with_an_example(tmp_path: Path) -> None:
    model = linear()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with advises(cures.LOAD_EXAMPLE, ConversionError):
        precast.load_converted(linear, tmp_path / "model.pt")
    assert is_converted_like(
        precast.load_converted(linear, tmp_path / "model.pt", example=X), model
    )


# --- export ---


def exported_result(model: nn.Module, x: Tensor = X, **settings: Any) -> Tensor:
    result: Tensor = precast.export(model, (X,), **settings).module()(x)
    return result


@pytest.mark.trial("EXPORT_UNSCRIPTED")
def test_the_source_of_a_scripted_module_is_exported() -> None:
    model = linear()
    with advises(cures.EXPORT_UNSCRIPTED, ExportError):
        precast.export(torch.jit.script(model), (X,))
    assert torch.equal(exported_result(model), in_region(model))


@pytest.mark.trial("EXPORT_TUPLE")
def test_a_single_argument_is_passed_in_a_tuple() -> None:
    with advises(cures.EXPORT_TUPLE, ExportError):
        precast.export(linear(), X)  # type: ignore[arg-type]
    assert exported_result(linear()).shape == (2, 8)


@pytest.mark.trial("EXPORT_RETARGET")
def test_a_policy_is_retargeted_to_the_device_of_the_model() -> None:
    policy = precast.Policy("gpu", {"cuda": precast.Policy.load("default").tables["cuda"]})
    with advises(cures.EXPORT_RETARGET, ExportError, device="cpu", like="cuda"):
        exported_result(linear(), policy=policy)
    retargeted = policy.retarget("cpu", like="cuda")
    assert exported_result(linear(), policy=retargeted).dtype is torch.bfloat16


@pytest.mark.trial("EXPORT_COND")
def test_a_decision_on_data_is_written_with_cond_or_made_outside() -> None:
    class Decides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x - 1

    class Conditional(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            branches = (lambda x: x + 1), (lambda x: x - 1)
            result: Tensor = torch.cond(x.sum() > 0, *branches, (x,))
            return result

    class Told(nn.Module):
        def forward(self, x: Tensor, up: bool) -> Tensor:
            return x + 1 if up else x - 1

    with advises(cures.EXPORT_COND, ExportError):
        precast.export(Decides(), (X,))
    for x in (X - 3, X + 3):
        up = bool(x.sum() > 0)
        assert torch.equal(exported_result(Conditional(), x), Decides()(x))
        assert torch.equal(precast.export(Told(), (x, up)).module()(x, up), Decides()(x))


@pytest.mark.trial("EXPORT_DETACH")
def test_detach_replaces_data() -> None:
    class Data(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.data

    class Detached(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.detach()

    with advises(cures.EXPORT_DETACH, ExportError):
        precast.export(Data(), (X,), strict=True)
    assert torch.equal(exported_result(Detached(), strict=True), Data()(X))


@pytest.mark.trial("EXPORT_RULE")
def test_an_operation_whose_values_decide_gets_a_rule_or_runs_outside() -> None:
    class Exponential(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.matrix_exp(x)

    class Outside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with precast.disable():
                return torch.linalg.matrix_exp(x)

    x, policy = torch.eye(4), precast.Policy.load("default").retarget("cpu", like="cuda")
    with advises(cures.EXPORT_RULE, ExportError, name="linalg_matrix_exp"):
        precast.export(Exponential(), (x,), policy=policy)
    ruled = policy.replace(ops={"linalg_matrix_exp": "fp32"})
    expected = torch.linalg.matrix_exp(x)
    assert torch.equal(precast.export(Exponential(), (x,), policy=ruled).module()(x), expected)
    assert torch.equal(precast.export(Outside(), (x,), policy=policy).module()(x), expected)
