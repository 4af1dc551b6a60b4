"""install: regions that PyTorch opens run on precast, and nothing of it is left behind."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear, Parameter

import precast
from precast import Policy
from precast.engine import registration
from precast.engine.thread_state import regions
from precast.errors import PolicyError
from tests.support.installed import uninstall_all

OTHER = Policy.load("torch").replace(name="other", ops={"linear": "fp32", "mm": "fp32"})


@pytest.fixture(autouse=True)
def _nothing_is_installed() -> Iterator[None]:
    registration.unregister()
    yield
    uninstall_all()
    assert registration.unregister()


def by_hand() -> AbstractContextManager[Any]:
    """A region as old code writes it: PyTorch's flags, and no object."""

    class Flags(AbstractContextManager[None]):
        def __enter__(self) -> None:
            torch.set_autocast_enabled("cpu", True)
            torch.autocast_increment_nesting()

        def __exit__(self, *exc_info: object) -> None:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            torch.set_autocast_enabled("cpu", False)

    return Flags()


def old_spelling() -> AbstractContextManager[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.cpu.amp.autocast()


REGIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch.autocast": lambda: torch.autocast("cpu"),
    "torch.amp.autocast": lambda: torch.amp.autocast("cpu"),
    "torch.cpu.amp.autocast": old_spelling,
    "flags": by_hand,
}


def product() -> torch.dtype:
    a = torch.ones(2, 2)
    return torch.mm(a, a).dtype


@pytest.mark.parametrize("spelling", REGIONS)
def test_every_spelling_of_a_region_runs_the_installed_policy(spelling: str) -> None:
    kept = REGIONS[spelling]()
    with kept:
        assert product() is torch.bfloat16
    installation = precast.install(OTHER)
    with kept:
        assert product() is torch.float32
    with REGIONS[spelling]():
        assert product() is torch.float32
    assert product() is torch.float32
    installation.uninstall()
    with kept:
        assert product() is torch.bfloat16


def test_a_region_that_is_already_open_is_on_it_too() -> None:
    with torch.autocast("cpu"):
        assert product() is torch.bfloat16
        installation = precast.install(OTHER)
        assert product() is torch.float32
        installation.uninstall()
        assert product() is torch.bfloat16


def test_it_holds_in_every_thread() -> None:
    found: list[torch.dtype] = []

    def work() -> None:
        with torch.autocast("cpu"):
            found.append(product())

    with precast.install(OTHER):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(10)
    assert found == [torch.float32]


def test_a_weight_written_in_pytorchs_region_is_seen() -> None:
    weight, x = Parameter(torch.ones(4, 4)), torch.ones(1, 4)
    with precast.install(), torch.autocast("cpu"):
        F.linear(x, weight)
        with torch.no_grad():
            weight.zero_()
        assert F.linear(x, weight).abs().max() == 0


@pytest.mark.parametrize("spelling", REGIONS)
def test_copies_live_as_long_as_pytorchs_outermost_region(spelling: str) -> None:
    layer, x = Linear(4, 4), torch.ones(1, 4)
    with precast.install():
        with REGIONS[spelling]():
            layer(x)
            assert len(regions.cache) == 2
            with torch.autocast("cpu"), precast.autocast("cpu"):
                layer(x)
            assert len(regions.cache) == 2
        assert len(regions.cache) == 0


def test_clearing_pytorchs_cache_clears_precasts() -> None:
    layer = Linear(4, 4)
    with precast.install(), torch.autocast("cpu"):
        layer(torch.ones(1, 4))
        assert len(regions.cache) == 2
        torch.clear_autocast_cache()
        assert len(regions.cache) == 0


def test_a_region_of_precast_has_the_installed_policy_where_it_names_none() -> None:
    with precast.install(OTHER):
        with precast.autocast("cpu"):
            assert product() is torch.float32
        with torch.autocast("cpu"), precast.autocast("cpu"):
            assert product() is torch.float32
        with precast.autocast("cpu", policy="torch"), torch.autocast("cpu"):
            assert product() is torch.bfloat16
    with precast.autocast("cpu"):
        assert product() is torch.bfloat16


def test_the_last_one_is_in_force_and_each_ends_by_itself() -> None:
    with torch.autocast("cpu"):
        first = precast.install(OTHER)
        with precast.install("torch") as second:
            assert product() is torch.bfloat16
            with precast.install(OTHER) as third:
                assert product() is torch.float32
                second.__exit__()
                assert product() is torch.float32
                assert "in force" in repr(third)
            assert "ended" in repr(third)
            assert product() is torch.float32
        first.__exit__()
        first.__exit__()
        assert product() is torch.bfloat16


def test_two_installations_of_a_policy_end_separately_and_once() -> None:
    first, second = precast.install(OTHER), precast.install(OTHER)
    first.uninstall()
    first.uninstall()
    with torch.autocast("cpu"):
        assert product() is torch.float32
    second.uninstall()
    with torch.autocast("cpu"):
        assert product() is torch.bfloat16


def test_a_policy_that_cannot_be_read_changes_nothing() -> None:
    before = names()
    with pytest.raises(PolicyError, match="no-such-policy"):
        precast.install("no-such-policy")
    assert names() == before


def names() -> dict[str, int]:
    """Everything that a module of PyTorch's amp has, by identity."""
    modules = ["torch.amp", "torch.amp.autocast_mode", "torch.amp.grad_scaler"]
    modules += ["torch.cuda.amp", "torch.cuda.amp.autocast_mode", "torch.cuda.amp.grad_scaler"]
    modules += ["torch.cpu.amp", "torch.cpu.amp.autocast_mode", "torch.cpu.amp.grad_scaler"]
    found = {
        f"{module}.{name}": id(value)
        for module in modules
        for name, value in vars(importlib.import_module(module)).items()
    }
    found |= {f"torch.{n}": id(getattr(torch, n)) for n in ("GradScaler", "clear_autocast_cache")}
    return found | {f"region.{n}": id(value) for n, value in vars(torch.autocast).items()}


@pytest.mark.parametrize("policy", ["torch", OTHER])
def test_nothing_is_left_behind(policy: Policy | str) -> None:
    before = names()
    precast.install(policy)
    assert names() != before
    with torch.autocast("cpu"):
        product()
    uninstall_all()
    assert names() == before


def test_no_kernel_is_left_where_no_other_thread_can_be_calling_one() -> None:
    program = (
        "import torch, precast; from precast.engine import registration as engine\n"
        "with precast.install(), torch.autocast('cpu'): torch.mm(torch.ones(2, 2), torch.ones(2, 2))\n"
        "assert not engine._registered and not engine._libraries"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_kernels_stay_where_another_thread_may_be_calling_one() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(10,))
    thread.start()
    with precast.install(OTHER), torch.autocast("cpu"):
        assert product() is torch.float32
    assert registration._registered
    with torch.autocast("cpu"):
        assert product() is torch.bfloat16  # they hand on
    with precast.autocast("cpu", policy=OTHER):
        assert product() is torch.float32
    done.set()
    thread.join(10)


def test_kernels_stay_while_another_thread_is_in_a_region() -> None:
    inside, leave = threading.Event(), threading.Event()
    found: list[torch.dtype] = []

    def work() -> None:
        with precast.autocast("cpu", policy=OTHER):
            inside.set()
            leave.wait(10)
            found.append(product())

    precast.install()
    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(10)
    uninstall_all()
    leave.set()
    thread.join(10)
    assert found == [torch.float32]
    registration.unregister()


def test_a_kept_region_works_after_the_kernels_were_taken_off() -> None:
    with precast.autocast("cpu", policy=OTHER):
        here = precast.current_precision()
    assert registration.unregister()
    with here:
        assert product() is torch.float32
    registration.unregister()


def test_threads_that_install_and_open_regions_at_once_are_never_without_their_policy() -> None:
    wrong: list[object] = []

    def install_and_end() -> None:
        for _ in range(30):
            with precast.install(OTHER):
                pass

    def work(make: Callable[[], AbstractContextManager[Any]], expected: set[torch.dtype]) -> None:
        for _ in range(150):
            with make():
                found = product()
            if found not in expected:
                wrong.append(found)

    both = {torch.float32, torch.bfloat16}
    threads = [
        threading.Thread(target=install_and_end),
        threading.Thread(target=install_and_end),
        threading.Thread(
            target=work,
            args=(lambda: precast.autocast("cpu", policy=OTHER), {torch.float32}),
        ),
        threading.Thread(target=work, args=(lambda: torch.autocast("cpu"), both)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    with torch.autocast("cpu"):
        assert product() is torch.bfloat16
    registration.unregister()


def test_scalers_made_afterwards_are_precasts() -> None:
    theirs = torch.amp.GradScaler("cpu")
    with precast.install():
        from torch.amp import GradScaler

        scaler = GradScaler("cpu", init_scale=4.0)
        assert type(scaler) is precast.GradScaler
        assert scaler.get_scale() == 4.0
        assert type(torch.GradScaler("cpu")) is precast.GradScaler
        for known in (scaler, theirs):
            assert isinstance(known, GradScaler)
            assert issubclass(type(known), torch.amp.GradScaler)
        assert not isinstance(1, GradScaler)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert type(torch.amp.GradScaler("cpu")) is type(theirs)


def test_old_spellings_of_the_scaler_warn_and_are_precasts() -> None:
    with precast.install():
        with pytest.warns(FutureWarning, match=r"torch\.amp\.GradScaler\('cpu', args\.\.\.\)"):
            scaler = torch.cpu.amp.GradScaler(init_scale=2.0)
        assert type(scaler) is precast.GradScaler
        assert scaler.get_scale() == 2.0
        with pytest.warns(FutureWarning, match="'cuda'"):
            scaler = torch.cuda.amp.GradScaler(enabled=False)
        assert not scaler.is_enabled()


def test_a_subclass_of_pytorchs_scaler_stays_pytorchs() -> None:
    theirs = torch.amp.GradScaler
    with precast.install():

        class Mine(torch.amp.GradScaler):
            def scale(self, outputs: Any) -> Any:
                return super().scale(outputs)

        assert Mine.__mro__[1] is theirs
        assert isinstance(Mine("cpu"), torch.amp.GradScaler)
        assert not isinstance(torch.amp.GradScaler("cpu"), Mine)


def test_custom_functions_defined_afterwards_are_precasts() -> None:
    with precast.install():
        from torch.amp import custom_bwd, custom_fwd

        assert (custom_fwd, custom_bwd) == (precast.custom_fwd, precast.custom_bwd)
        from torch.cuda.amp import custom_fwd as old_fwd

        with pytest.warns(FutureWarning, match=r"device_type='cuda'"):
            decorated = old_fwd(lambda ctx, x: x)
        assert decorated(None, 3) == 3
        with pytest.warns(FutureWarning, match="custom_bwd"):
            torch.cuda.amp.custom_bwd(lambda ctx, g: g)


def test_a_rule_for_an_operation_defined_later_holds_when_it_is() -> None:
    policy = Policy.load("torch").replace(name="mine", ops={"precast_later::half": "fp32"})
    with pytest.warns(precast.errors.PrecastWarning, match="precast_later::half"):
        precast.install(policy)

    @torch.library.custom_op("precast_later::half", mutates_args=())
    def half(x: Tensor) -> Tensor:
        return x / 2

    x = torch.ones(2).bfloat16()
    with torch.autocast("cpu"):
        pass
    with torch.autocast("cpu"):
        assert half(x).dtype is torch.float32


def test_what_was_compiled_is_compiled_again_for_another_policy() -> None:
    compiled = torch.compile(lambda a: torch.mm(a, a), backend="aot_eager")
    a = torch.ones(2, 2)
    found = []
    for policy in (None, OTHER, "torch", OTHER, None):
        uninstall_all()
        if policy is not None:
            precast.install(policy)
        with torch.autocast("cpu"):
            found.append(compiled(a).dtype)
    lower, full = torch.bfloat16, torch.float32
    assert found == [lower, full, lower, full, lower]


def test_scripted_functions_follow_the_installed_policy() -> None:
    @torch.jit.script
    def scripted(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b)

    a, b = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    with precast.install(OTHER):
        for _ in range(3):
            with torch.autocast("cpu"), torch.autocast("cpu"):
                result = scripted(a, b)
                assert torch.equal(result, a.mm(b.float()))
            result.sum().backward()
            assert torch._C._get_graph_executor_optimize()


def test_a_patch_of_another_library_outlives_the_installation() -> None:
    original = torch.amp.custom_fwd
    precast.install()

    def patched(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    torch.amp.custom_fwd = patched
    try:
        uninstall_all()
        assert torch.amp.custom_fwd is patched
        assert torch.amp.custom_bwd is not precast.custom_bwd
    finally:
        torch.amp.custom_fwd = original
