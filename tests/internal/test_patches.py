"""Patches of PyTorch: none at import, each one listed, and those that end put back what was there.

Fresh processes run what is named `in_a_process_...` here, so this file imports precast nowhere at its top.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.torch_attributes import Key, TorchAttributes, key_of

ROOT = Path(__file__).parents[2]


def _listed(patches: Mapping[str, tuple[str, ...]]) -> set[Key]:
    keys = {(key_of(owner), name) for owner, names in patches.items() for name in names}
    return {(owner, name) for owner, name in keys if owner is not None}


def _lasting() -> set[Key]:
    """What stays patched once it is: regions in graphs, which are PyTorch's ordinary ones in 2.11."""
    from precast._torch import LASTING, PATCHES

    if hasattr(torch.amp.autocast_mode, "_UnmanagedAutocast"):
        return _listed(LASTING)
    return _listed({**LASTING, "torch:autocast": PATCHES["torch:autocast"]})


def _answer(program: Callable[[], None]) -> Any:
    code = f"from {__name__} import {program.__name__} as program; program()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# --- importing ---


def in_a_process_import_all() -> None:

    assert "precast" not in sys.modules
    attributes = TorchAttributes()
    import precast

    for name in precast.__all__:
        getattr(precast, name)
    import precast.running.scaler_observer
    import precast.running.step_tracker

    print(json.dumps(sorted(attributes.changed())))


def test_importing_precast_and_all_its_names_patches_nothing() -> None:
    assert _answer(in_a_process_import_all) == []


# --- the list ---


def in_a_process_use_all() -> None:
    """Prints what is another object while each feature is in use, and what is one afterwards."""
    warnings.simplefilter("ignore")
    linear = nn.Linear(160, 160)

    def compiled(region: Callable[[], Any]) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            with region():
                return linear(x).sum()

        torch.compile(function, backend="eager")(torch.ones(2, 160)).backward()

    # What PyTorch replaces itself, when it compiles or makes an optimizer, is none of ours.
    compiled(lambda: torch.autocast("cpu"))
    torch.optim.SGD(linear.parameters(), 0.1)
    importlib.import_module("torch._inductor.compile_fx")
    attributes = TorchAttributes()
    during: dict[str, list[Key]] = {}
    for feature in _FEATURES:
        with ExitStack() as until:
            feature(until, linear)
            during[feature.__name__] = sorted(attributes.changed())
    import precast
    from tests.support.installed import uninstall_all

    compiled(lambda: precast.autocast("cpu", policy="default"))
    during["compiled"] = sorted(attributes.changed())
    uninstall_all()
    print(json.dumps({"during": during, "afterwards": sorted(attributes.changed())}))


def _region(_: ExitStack, linear: nn.Linear) -> None:
    import precast

    with precast.autocast("cpu", policy="default"):
        for reentrant in (True, False):
            x = torch.ones(2, 160, requires_grad=True)
            checkpoint(linear, x, use_reentrant=reentrant).sum().backward()


def _trace(until: ExitStack, linear: nn.Linear) -> None:
    import precast

    until.enter_context(precast.trace())
    _region(until, linear)


def _monitor(until: ExitStack, linear: nn.Linear) -> None:
    import precast

    until.enter_context(precast.monitor(linear))
    _region(until, linear)


def _scalers(_: ExitStack, linear: nn.Linear) -> None:
    import precast

    scaler, optimizer = precast.GradScaler("cpu"), torch.optim.SGD(linear.parameters(), 0.1)
    scaler.scale(linear(torch.ones(2, 160)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def _install(until: ExitStack, linear: nn.Linear) -> None:
    import precast

    rules = precast.Policy.load("default").replace(
        name="rules", ops={"linear": "fp32"}, modules={"0": "fp32"}
    )
    until.enter_context(precast.install(rules))
    with torch.autocast("cpu"):
        nn.Sequential(linear)(torch.ones(2, 160)).sum().backward()
    torch.amp.GradScaler("cpu")


def _attach(until: ExitStack, linear: nn.Linear) -> None:
    import precast

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    until.callback(dist.destroy_process_group)
    until.callback(precast.attach(linear).detach)
    _region(until, linear)
    dist.all_reduce(torch.ones(2))


def _weights_in_16_bits(until: ExitStack, _: nn.Linear) -> None:
    import precast

    model = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    rules = precast.Policy.load("default").replace(modules={"0": "fp32"})
    until.callback(precast.attach(model, rules).detach)
    with precast.autocast("cpu"):
        model(torch.ones(1, 4))


def _average(until: ExitStack, _: nn.Linear) -> None:
    import precast

    layer = nn.Linear(160, 160)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    until.callback(precast.optim.bfloat16_weights(layer, optimizer).remove)


def _convert(_: ExitStack, linear: nn.Linear) -> None:
    import precast

    precast.convert(linear.eval(), example=torch.ones(2, 160))


def _run(until: ExitStack, linear: nn.Linear) -> None:
    from precast.running.scaler_observer import ScalerObserver
    from precast.running.step_order import StepOrder
    from precast.running.step_tracker import StepTracker

    for watcher in (
        StepTracker(lambda _: None, lambda _: None),
        ScalerObserver(lambda _, __: None, lambda _: None),
        StepOrder(lambda: 0),
    ):
        watcher.start()
        until.callback(watcher.stop)
    linear(torch.ones(2, 160)).sum().backward()


def _try(until: ExitStack, _: nn.Linear) -> None:
    from precast import _torch

    class OwnRegion(torch.autocast):
        pass

    class OwnScaler(torch.amp.GradScaler):
        pass

    for stop in (
        _torch.around_backward(lambda run, _roots, gradients: run(gradients)),
        _torch.on_region_entry(lambda _dtype: True, OwnRegion),
        _torch.disable_scalers(OwnScaler),
        _torch.multiply_batches(2),
        _torch.change_seeds(lambda seed: seed),
        _torch.redirect_files(lambda function, _uses, _names: partial(function)),
    ):
        until.callback(stop)


def _export(until: ExitStack, _: nn.Linear) -> None:
    from precast import _torch
    from precast.shipping.dtype_errors import fake_as_real

    until.enter_context(fake_as_real())
    until.enter_context(_torch.unfused_attention())


def _package(until: ExitStack, _: nn.Linear) -> None:
    from precast._torch import prefer_torch_kernels

    until.enter_context(prefer_torch_kernels())


_FEATURES: list[Callable[[ExitStack, nn.Linear], None]] = [
    _region,
    _trace,
    _monitor,
    _scalers,
    _install,
    _attach,
    _weights_in_16_bits,
    _average,
    _convert,
    _run,
    _try,
    _export,
    _package,
]


@pytest.fixture(scope="module")
def used() -> Any:
    return _answer(in_a_process_use_all)


def test_all_that_is_patched_is_on_the_list(used: Any) -> None:
    from precast._torch import PATCHES

    for feature, keys in used["during"].items():
        assert {tuple(key) for key in keys} <= _listed(PATCHES), feature


def test_all_that_is_on_the_list_is_patched_by_a_feature(used: Any) -> None:
    from precast._torch import PATCHES

    patched = {tuple(key) for keys in used["during"].values() for key in keys}
    for owner, names in PATCHES.items():
        assert key_of(owner) is None or patched & _listed({owner: names}), owner


def test_what_ends_is_what_it_was(used: Any) -> None:
    assert {tuple(key) for key in used["afterwards"]} == _lasting()


# --- how one ends ---


def test_what_is_not_on_the_list_is_not_patched() -> None:
    from precast._torch import patches

    with pytest.raises(AssertionError, match="is not in PATCHES"):
        patches.replace_names("torch", matmul=None)


def test_what_somebody_else_has_put_on_top_stays() -> None:
    """And ours, which it calls, does nothing any more."""
    import precast._torch as doors

    told: list[bool] = []

    class Listener:
        def entered(self) -> None:
            told.append(True)

        def left(self) -> None:
            pass

        def switched(self, device_type: str, enabled: bool) -> None:
            pass

    pytorchs = torch.autocast_increment_nesting
    doors.on_regions(Listener())
    ours = torch.autocast_increment_nesting

    def theirs() -> int:
        return ours()

    try:
        torch.autocast_increment_nesting = theirs
        doors.on_regions(None)
        assert torch.autocast_increment_nesting is theirs
        with torch.autocast("cpu"):
            pass
    finally:
        torch.autocast_increment_nesting = pytorchs
    assert told == []


def test_the_first_region_has_checkpoints_run_again_in_its_policy() -> None:
    """Also after all patches have ended once."""
    import precast
    from tests.support.installed import uninstall_all

    exact = precast.Policy.load("default").replace(name="exact", ops={"linear": "fp32"})
    linear, dtypes = nn.Linear(4, 4), []

    def function(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        dtypes.append(y.dtype)
        return y.cos().sum()  # which is computed again before its backward

    uninstall_all()
    with precast.autocast("cpu", policy=exact):
        loss = checkpoint(function, torch.ones(2, 4, requires_grad=True), use_reentrant=False)
    uninstall_all()
    loss.backward()
    assert dtypes == [torch.float32, torch.float32]
