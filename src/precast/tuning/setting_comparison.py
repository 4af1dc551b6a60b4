"""compare_settings: one model under two settings in one process, and the policy that cures their difference.

Invariants: copies of the model run, without gradients and from the same random state; the model does not change. The
cure satisfies the bound in a run, and no module can be left out of it. Where there are at most `_MOST_TRIALS` sets of a
size, all smaller ones were tried: it is the smallest.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn

from precast._internal.display import dtype_name
from precast._internal.pytree import map_tensors, tensors_in
from precast.attachment.attachment import attach
from precast.autocast_mode.region import autocast
from precast.comparison.aligned_steps import relative
from precast.comparison.comparing import compare, files_of
from precast.comparison.difference import RunDifference
from precast.comparison.recording import record
from precast.comparison.recording_file import RecordingReader
from precast.errors import ComparisonError
from precast.policy.module_names import name_of_each
from precast.policy.policy import Policy, Precision
from precast.policy.shortest_text import whole_file
from precast.shipping.converted import convert
from precast.shipping.exported import export
from precast.tuning.setups import copy_model, current_time, preserved_random_states, seed_all

__all__ = ["Form", "Setting", "compare_settings", "cure", "smallest_set"]

Form = Literal["region", "attached", "converted", "exported", "compiled"]
_FORMS: Final = get_args(Form)
_TIMED: Final = 5
_MOST_TRIALS: Final = 256
"""The most sets of one size that are tried."""


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
    with contextlib.closing(RecordingReader(files_of(path)[0])) as reader:
        recorded = next((reader.setting for _ in reader.steps() if reader.setting), None)
    if recorded is None:
        return Setting()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "policy.toml")
        file.write_text(recorded["policy"], encoding="utf-8")
        policy = Policy.load(file)
    return Setting(policy, getattr(torch, recorded["dtype"]), device=recorded["device"])


def _name(setting: Setting) -> str:
    """Return a setting as text, such as "default, bfloat16, region"."""
    policy, dtype = setting.policy, setting.dtype
    name = policy.name if isinstance(policy, Policy) else str(policy or "float32")
    form = "" if policy is None and setting.form == "region" else setting.form
    return ", ".join(filter(None, (name, dtype_name(dtype) if dtype else "", form)))


def _cured(
    model: nn.Module, batch: Any, a: Setting, b: Setting, difference: RunDifference
) -> RunDifference:
    """Return the difference with its cure, if the bound is exceeded; with a note, if there is none."""
    if difference.within_bound:
        return difference
    if b.policy is None:
        note = "No cure: the second run is in no region, so no policy changes it."
        return replace(difference, notes=[*difference.notes, note])
    reference, base = _run(model, batch, a), _policy(b.policy)
    # A model to ship would be made for each set of modules that is tried.
    searched: Form = "region" if b.form in {"converted", "exported", "compiled"} else b.form

    def with_float32(modules: frozenset[str], form: Form) -> Setting:
        rules = dict.fromkeys(sorted(modules), Precision.FP32)
        return replace(b, policy=base.replace(name="cured", modules=rules), form=form)

    @functools.cache
    def distance(modules: frozenset[str], form: Form = searched) -> float:
        return _relative_distance(reference, _run(model, batch, with_float32(modules, form)))

    for group in _float32_groups(model):
        modules = smallest_set(group, distance, difference.bound) if group else None
        # A converted or exported model may round elsewhere.
        if modules is None or distance(modules, b.form) > difference.bound:
            continue
        cured = with_float32(modules, b.form)
        assert isinstance(cured.policy, Policy)
        seconds = _seconds(model, batch, cured) / _seconds(model, batch, b)
        return replace(difference, cure=whole_file(cured.policy), cure_seconds=seconds)
    note = "No cure: with all modules in float32 the results still differ by more than the bound."
    return replace(difference, notes=[*difference.notes, note])


def _run(
    model: nn.Module, batch: Any, setting: Setting, file: Path | None = None, split: int = 1
) -> list[Tensor]:
    """Return the floating-point results of a copy of the model; also record the run, with parts of the batch."""
    with _prepared(model, batch, setting) as (module, run):
        seed_all(0)
        with contextlib.nullcontext() if file is None else record(file, module, split=split):
            outputs = run()
    parts = [
        [each for each in tensors_in(output) if each.is_floating_point()] for output in outputs
    ]
    if not parts[0]:
        raise ComparisonError(
            f"compare_settings: the model returned {type(outputs[0]).__name__}; expected floating-point tensors"
        )
    # The results of the parts, one below the other.
    return [
        torch.cat([*map(torch.atleast_1d, each)]).cpu().double()
        for each in zip(*parts, strict=True)
    ]


@contextlib.contextmanager
def _prepared(
    model: nn.Module, batch: Any, setting: Setting
) -> Iterator[tuple[nn.Module, Callable[[], list[Any]]]]:
    """Yield a copy of the model under a setting, and a function that returns its results for the parts of the batch."""
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    device = torch.device(setting.device or device)
    module = copy_model(model).to(device)
    call_arguments: Any = ((), batch) if isinstance(batch, dict) else (batch, {})
    if not isinstance(call_arguments[0], tuple):
        call_arguments = (batch,), {}
    parts = _parts(map_tensors(call_arguments, lambda each: each.to(device)), setting.split)
    args, kwargs = parts[0]
    policy = None if setting.policy is None else _policy(setting.policy)
    with contextlib.ExitStack() as stack:
        if policy is not None and setting.form in {"region", "attached", "compiled"}:
            if policy.modules or setting.form == "attached":
                attachment = attach(module, policy, hold=setting.form == "attached")
                stack.callback(attachment.detach)
            stack.enter_context(autocast(device.type, dtype=setting.dtype, policy=policy))
        call: Any = module
        if policy is not None and setting.form == "converted":
            example = kwargs or args
            call = module = convert(module, policy, setting.dtype, example=example, in_place=True)
        elif policy is not None and setting.form == "exported":
            exported = export(module, args, kwargs, policy=policy, dtype=setting.dtype)
            call = module = exported.module()
        elif setting.form == "compiled":
            call = torch.compile(module)
            call(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        parts = copy.deepcopy(parts)
        yield module, lambda: [call(*args, **kwargs) for args, kwargs in parts]


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


def _relative_distance(reference: list[Tensor], results: list[Tensor]) -> float:
    """Return the distance of all results together, relative to the norm of the reference."""
    if [each.shape for each in reference] != [each.shape for each in results]:
        return math.inf
    pairs = zip(reference, results, strict=True)
    distance = relative((float((one - other).norm()), float(one.norm())) for one, other in pairs)
    return math.inf if math.isnan(distance) else distance


def _seconds(model: nn.Module, batch: Any, setting: Setting) -> float:
    """Return the median time of a run under a setting."""
    times = []
    with _prepared(model, batch, setting) as (module, run):
        device_type = next((each.device.type for each in module.parameters()), "cpu")
        run()
        for _ in range(_TIMED):
            start = current_time(device_type)
            run()
            times.append(current_time(device_type) - start)
    return statistics.median(times)


def _float32_groups(model: nn.Module) -> Iterator[list[str]]:
    """Yield sets of modules that together run a model in float32: those without children, all, and the model itself."""
    names = [(name, module) for name, module in name_of_each(model) if name]
    yield [name for name, module in names if next(module.children(), None) is None]
    yield [name for name, _ in names]
    yield [""]


def smallest_set(
    modules: Sequence[str], distance: Callable[[frozenset[str]], float], bound: float
) -> frozenset[str] | None:
    """Return the smallest set of modules with at most this distance; None if all of them together exceed it.

    Args:
        modules: the modules to choose from.
        distance: returns the distance of the results with these modules in float32.
        bound: the distance that is allowed.
    """
    every = frozenset(modules)
    if distance(every) > bound:
        return None
    gains = {name: distance(frozenset({name})) for name in modules}
    ordered = sorted(modules, key=gains.__getitem__)
    chosen: list[str] = []
    while distance(frozenset(chosen)) > bound:
        chosen.append(ordered[len(chosen)])
    for name in reversed(chosen[:-1]):
        fewer = [each for each in chosen if each != name]
        if distance(frozenset(fewer)) <= bound:
            chosen = fewer
    for size in range(1, len(chosen)):
        if math.comb(len(modules), size) > _MOST_TRIALS:
            break
        smaller = (frozenset(each) for each in itertools.combinations(ordered, size))
        answer = next((each for each in smaller if distance(each) <= bound), None)
        if answer is not None:
            return answer
    return frozenset(chosen)
