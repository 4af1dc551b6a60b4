"""compare_settings: one model under two settings in one process, and the policy that cures their difference.

Invariants: copies of the model run, without gradients and from the same random state; the model does not change.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn

from precast._internal.pytree import map_tensors, tensors_in
from precast.attachment.attachment import attach
from precast.autocast_mode.region import autocast
from precast.comparison.comparing import compare
from precast.comparison.difference import RunDifference
from precast.comparison.ranks import files_of
from precast.comparison.recording import record
from precast.comparison.recording_file import RecordingReader
from precast.errors import ComparisonError
from precast.policy.policy import Policy, Precision
from precast.policy.shortest_text import whole_file
from precast.shipping.converted import convert
from precast.shipping.exported import export
from precast.tuning.precision_cure import float32_groups, smallest_set
from precast.tuning.setups import copy_model, current_time, preserved_random_states, seed_all

__all__ = ["Form", "Setting", "compare_settings", "cure"]

Form = Literal["region", "attached", "converted", "exported", "compiled"]
_FORMS: Final = get_args(Form)
_TIMED: Final = 5
_CURED: Final = "cured"


@dataclass(frozen=True)
class Setting:
    """One of two settings that `compare_settings` compares.

    Attributes:
        policy: the policy of the region, a preset or the path of a policy file; None for no region.
        dtype: the dtype of the region; None for PyTorch's on the device.
        form: "region" runs the model as it is, "attached" with held weights, "converted" and "exported" as `convert`
            and `export` return it, "compiled" with `torch.compile`.
        device: the device, such as "cuda"; None for the model's own.
        split: the number of equal parts of the batch that are computed one by one.

    Raises:
        ComparisonError: a form without a policy, an unknown form, or a split below 1.
    """

    policy: Policy | str | os.PathLike[str] | None = None
    dtype: torch.dtype | None = None
    form: Form = "region"
    device: str | None = None
    split: int = 1

    def __post_init__(self) -> None:
        if self.form not in _FORMS:
            raise ComparisonError(
                f"Setting(form=...): expected one of {', '.join(_FORMS)}, got {self.form!r}"
            )
        if self.split < 1:
            raise ComparisonError(f"Setting(split=...): expected at least 1, got {self.split}")
        if self.policy is None and self.form in {"attached", "converted", "exported"}:
            raise ComparisonError(
                f"Setting(form={self.form!r}) needs a policy, as in Setting('default', form={self.form!r})"
            )


def compare_settings(
    model: nn.Module, batch: Any, *, a: Setting, b: Setting, bound: float = 0.0
) -> RunDifference:
    """Run a model under two settings, compare the runs, and find the policy that cures the difference.

    If the second setting has a policy and the results differ by more than the bound, modules are computed in float32,
    one set after the other, until the results agree within the bound. The smallest such set is the cure, as a policy.

    Args:
        model: the model, in the mode in which it is to run. Copies of it run.
        batch: its argument, a tuple of its arguments, or a dict of its keyword arguments.
        a: the setting that counts as right.
        b: the setting that is compared with it.
        bound: the relative distance of the results that is allowed.

    Raises:
        ComparisonError: `model` is no module, or its result has no floating-point tensor.
        TuningError: the model cannot be copied.

    Examples:
        >>> import precast
        >>> model = torch.nn.Linear(16, 4)
        >>> x = torch.randn(8, 16)
        >>> settings = precast.Setting(), precast.Setting("default", torch.bfloat16)
        >>> difference = precast.compare_settings(model, x, a=settings[0], b=settings[1])
        >>> difference.cause.kind
        'dtype'
    """
    if not isinstance(model, nn.Module):
        raise ComparisonError(
            f"compare_settings(model, ...): expected a torch.nn.Module, got {type(model).__name__}"
        )
    with preserved_random_states(), torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("a.run", "b.run")]
        for setting, other, file in zip((a, b), (b, a), files, strict=True):
            _run(model, batch, setting, file, other.split if setting.split == 1 else 1)
        difference = compare(*files, bound=bound)
        difference = replace(difference, a=_name(a), b=_name(b))
        return _cured(model, batch, a, b, difference)


def cure(model: nn.Module, batch: Any, difference: RunDifference) -> RunDifference:
    """Return the difference of two recordings with the policy that cures it, for their model and a batch.

    Raises:
        ComparisonError: the result of the model has no floating-point tensor.
        TuningError: the model cannot be copied.
    """
    a, b = (_recorded_setting(Path(each)) for each in (difference.a, difference.b))
    with preserved_random_states(), torch.no_grad():
        return _cured(model, batch, a, b, difference)


def _recorded_setting(path: Path) -> Setting:
    """Return the region around the model in a recording."""
    reader = RecordingReader(files_of(path)[0])
    recorded = next((part.setting for part in reader.parts() if part.setting), None)
    reader.close()
    if recorded is None:
        return Setting()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "policy.toml")
        file.write_text(recorded["policy"], encoding="utf-8")
        policy = Policy.load(file)
    return Setting(policy, getattr(torch, recorded["dtype"]), device=recorded["device"])


def _name(setting: Setting) -> str:
    """Return a setting as text, such as "default, bfloat16, region"."""
    if setting.policy is None:
        return "float32" if setting.form == "region" else f"float32, {setting.form}"
    policy = setting.policy.name if isinstance(setting.policy, Policy) else str(setting.policy)
    dtype = [] if setting.dtype is None else [str(setting.dtype).removeprefix("torch.")]
    return ", ".join([policy, *dtype, setting.form])


def _cured(
    model: nn.Module, batch: Any, a: Setting, b: Setting, difference: RunDifference
) -> RunDifference:
    """Return the difference with its cure, if the bound is exceeded; with a note, if there is none."""
    if difference.within_bound:
        return difference
    if b.policy is None:
        note = "No cure: the second run is in no region, so no policy changes it."
        return replace(difference, notes=[*difference.notes, note])
    reference = _run(model, batch, a)
    base = _policy(b.policy)

    def policy_for(modules: frozenset[str]) -> Policy:
        return base.replace(name=_CURED, modules=dict.fromkeys(sorted(modules), Precision.FP32))

    @functools.cache
    def distance(modules: frozenset[str]) -> float:
        setting = replace(b, policy=policy_for(modules), form=_searched(b.form))
        return _relative_distance(reference, _run(model, batch, setting))

    for group in float32_groups(model):
        modules = smallest_set(group, distance, difference.bound) if group else None
        if modules is None:
            continue
        cure = replace(b, policy=policy_for(modules))
        if _relative_distance(reference, _run(model, batch, cure)) > difference.bound:
            continue  # a converted or exported model may round elsewhere
        seconds = _seconds(model, batch, cure) / _seconds(model, batch, b)
        return replace(difference, cure=whole_file(policy_for(modules)), cure_seconds=seconds)
    note = "No cure: with all modules in float32 the results still differ by more than the bound."
    return replace(difference, notes=[*difference.notes, note])


def _searched(form: Form) -> Form:
    """Return the form in which sets of modules are tried: those of a model to ship would be made for each set."""
    return "region" if form in {"converted", "exported", "compiled"} else form


def _run(
    model: nn.Module, batch: Any, setting: Setting, file: Path | None = None, split: int = 1
) -> list[Tensor]:
    """Return the floating-point results of a copy of the model; also record the run, with parts of the batch."""
    with _callable(model, batch, setting) as (module, run, parts):
        seed_all(0)
        recording = contextlib.nullcontext() if file is None else record(file, module, split=split)
        with recording:
            output = [run(*args, **kwargs) for args, kwargs in parts]
    results = [
        each.detach().cpu().double() for each in tensors_in(output) if each.is_floating_point()
    ]
    if setting.split > 1:  # the results of the parts, one below the other
        count = len(results) // setting.split
        rows = [each if each.dim() else each[None] for each in results]
        results = [torch.cat(rows[i::count]) for i in range(count)]
    if not results:
        raise ComparisonError(
            f"compare_settings: the model returned {type(output[0]).__name__}; expected floating-point tensors"
        )
    return results


@contextlib.contextmanager
def _callable(
    model: nn.Module, batch: Any, setting: Setting
) -> Iterator[tuple[nn.Module, Callable[..., Any], list[Any]]]:
    """Yield a copy of the model under a setting, a function that runs it, and copies of the arguments of its calls."""
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    device = torch.device(setting.device or device)
    module = copy_model(model).to(device)
    parts = [
        _arguments(each)
        for each in _parts(map_tensors(batch, lambda each: each.to(device)), setting.split)
    ]
    args, kwargs = parts[0]
    policy = None if setting.policy is None else _policy(setting.policy)
    with contextlib.ExitStack() as stack:
        if policy is not None and setting.form in {"region", "attached", "compiled"}:
            if policy.modules or setting.form == "attached":
                attachment = attach(module, policy, hold=setting.form == "attached")
                stack.callback(attachment.detach)
            stack.enter_context(autocast(device.type, dtype=setting.dtype, policy=policy))
        run: Any = module
        if policy is not None and setting.form == "converted":
            example = kwargs or args
            run = module = convert(module, policy, setting.dtype, example=example, in_place=True)
        elif policy is not None and setting.form == "exported":
            exported = export(module, args, kwargs, policy=policy, dtype=setting.dtype)
            run = module = exported.module()
        elif setting.form == "compiled":
            run = torch.compile(module)
            run(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        yield module, run, copy.deepcopy(parts)


def _parts(batch: Any, split: int) -> list[Any]:
    """Return equal parts of a batch: those of each tensor with as many rows as the first one."""
    if split == 1:
        return [batch]
    size = next((len(each) for each in tensors_in(batch) if each.dim()), 0)
    if size % split or not size:
        raise ComparisonError(f"Setting(split={split}): the batch has {size} rows")

    def part(index: int, value: Tensor) -> Tensor:
        return value.chunk(split)[index] if value.dim() and len(value) == size else value

    return [map_tensors(batch, functools.partial(part, index)) for index in range(split)]


def _policy(policy: Policy | str | os.PathLike[str]) -> Policy:
    return policy if isinstance(policy, Policy) else Policy.load(policy)


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call."""
    if isinstance(batch, dict):
        return (), batch
    return (batch if isinstance(batch, tuple) else (batch,)), {}


def _relative_distance(reference: list[Tensor], results: list[Tensor]) -> float:
    """Return the distance of all results together, relative to the norm of the reference."""
    if [each.shape for each in reference] != [each.shape for each in results]:
        return math.inf
    pairs = zip(reference, results, strict=True)
    distance = math.hypot(*(float((one - other).norm()) for one, other in pairs))
    norm = math.hypot(*(float(each.norm()) for each in reference))
    if not math.isfinite(distance):
        return math.inf
    return distance / norm if norm else distance


def _seconds(model: nn.Module, batch: Any, setting: Setting) -> float:
    """Return the median time of a run under a setting."""
    with _callable(model, batch, setting) as (module, run, parts):
        device_type = next((each.device.type for each in module.parameters()), "cpu")
        run(*parts[0][0], **parts[0][1])
        times = []
        for _ in range(_TIMED):
            start = current_time(device_type)
            for args, kwargs in parts:
                run(*args, **kwargs)
            times.append(current_time(device_type) - start)
    return statistics.median(times)
