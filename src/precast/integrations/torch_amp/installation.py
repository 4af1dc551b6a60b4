"""`install`: PyTorch's own regions, in all code of the process, run on precast's engine, policy and weight cache.

Invariants:

- a region of PyTorch's keeps its flags *enabled* and *dtype*; the installation adds the policy and the cache, in every
  thread that is in no region of precast's;
- the policy's rules for modules act on the models that the program calls, from their first call;
- the latest installation is in force; each ends separately, in any order;
- the end of the last one restores every name of PyTorch's, unless a thread is still in a region of precast's. It also
  restores the dispatcher, unless other threads may be calling a kernel: kernels that stay call PyTorch's.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from precast import _torch
from precast._internal.locks import make_fork_safe
from precast.attachment.called_models import CalledModels
from precast.engine import registration
from precast.engine.thread_state import BoundPolicy, installed
from precast.errors import PrecastWarning
from precast.integrations.torch_amp.replacements import FUNCTIONS, SCALERS, let_be_pickled
from precast.policy.policy import DEVICE_TYPES, Policy, as_policy
from precast.report.schema import ModuleRuleEffects
from precast.weights import unversioned_writes

__all__ = ["Installation", "install", "install_to_observe"]

_lock = make_fork_safe(threading.RLock())
_installations: list[Installation] = []
_replaced: Final[list[Callable[[], None]]] = []
"""Functions that restore the names of PyTorch's that were replaced."""


class Installation(AbstractContextManager["Installation"]):
    """PyTorch's regions on a policy of precast's, until `uninstall` or the end of a ``with`` block; made by `install`.

    Attributes:
        policy: the policy.
    """

    def __init__(self, policy: Policy, *, replaces_scalers: bool = True) -> None:
        self.policy = policy
        self._replaces_scalers = replaces_scalers
        self._models: CalledModels | None = None
        self._rules = ModuleRuleEffects({}, [])

    def __exit__(self, *exc_info: object) -> None:
        self.uninstall()

    def uninstall(self) -> None:
        """End this installation: the latest of the others is in force, or PyTorch. A second call does nothing."""
        with _lock:
            if self in _installations:
                _installations.remove(self)
                self._find_models(False)
                _put_in_force()

    @property
    def rules(self) -> ModuleRuleEffects:
        """The effect of the policy's rules for modules: the models they act on, and the rules without effect."""
        return self._rules if self._models is None else self._models.rules()

    def _find_models(self, enabled: bool) -> None:
        """Start or stop applying the policy's rules to the models that are called."""
        if enabled and self._models is None and self.policy.modules:
            self._models = CalledModels(self.policy, self._refused)
        elif not enabled and self._models is not None:
            self._rules = self._models.rules()
            self._models.close()
            self._models = None

    def _refused(self, sentence: str) -> None:
        if self._replaces_scalers:  # otherwise a report contains the sentence
            warnings.warn(
                f"install({self.policy.name!r}): {sentence}", PrecastWarning, stacklevel=6
            )

    def __repr__(self) -> str:
        state = "in force" if self in _installations else "ended"
        return f"<{state}: install({self.policy.name!r})>"


def install(policy: Policy | str | os.PathLike[str] = "torch") -> Installation:
    """Run PyTorch's own autocast regions on precast's engine, in the whole process and in all threads, from now on.

    Every `torch.autocast`, `torch.amp.autocast`, `torch.cuda.amp.autocast` and `torch.cpu.amp.autocast` region,
    however it was imported, including open ones, uses the policy and the weight cache of precast. In code that is
    imported later, `torch.amp.GradScaler` is `precast.GradScaler`, `custom_fwd` and `custom_bwd` are precast's, and
    so are their old spellings in `torch.cuda.amp`; a subclass of PyTorch's scaler keeps PyTorch's base class.

    The policy's rules for modules act on every model with parameters that is called from now on, by the names inside
    the outermost module that is called. `Installation.rules` reports their effect.

    Args:
        policy: a `Policy`, the name of a preset or the path of a policy file. "torch" gives PyTorch's own results, to
            the bit, except where `docs/differences.md` says otherwise.

    Returns:
        The installation, which ends with its ``with`` block or by its `uninstall`.

    Raises:
        PolicyError: the policy cannot be read; then nothing has changed.

    Examples:
        >>> with install("default"), torch.autocast("cpu"):
        ...     torch.cat([torch.ones(2).half(), torch.ones(2).bfloat16()]).dtype  # PyTorch raises
        torch.float32
    """
    return _begin(Installation(as_policy(policy)))


def install_to_observe(policy: Policy) -> Installation:
    """Install the policy, but keep PyTorch's scalers and their behaviour."""
    return _begin(Installation(policy, replaces_scalers=False))


def _begin(installation: Installation) -> Installation:
    with _lock:
        _installations.append(installation)
        _put_in_force()
    return installation


def _put_in_force() -> None:
    for installation in _installations:
        installation._find_models(installation is _installations[-1])
    policy = _installations[-1].policy if _installations else None
    before = _meanings()
    for device in filter(_torch.has_device, DEVICE_TYPES):
        installed(device).set_policy(None if policy is None else registration.bind(policy, device))
    has_pending = any(bound and bound.undefined_operations for bound in _bound_policies())
    ours = {unversioned_writes.check_at_exit: policy is not None, _bind_again: has_pending}
    hooks = registration.cache_clear_hooks
    hooks[:] = [act for act in hooks if act not in ours]
    hooks += [act for act, is_needed in ours.items() if is_needed]
    _restore_names()
    if policy is None:
        registration.unregister(kernels=threading.active_count() == 1)
    else:
        _replace_names()
    if before != _meanings():
        _torch.reset_compiler()


def _bound_policies() -> list[BoundPolicy | None]:
    """Return the installed policy of each device type."""
    return [installed(device).bound_policy for device in DEVICE_TYPES]


def _meanings() -> list[str | None]:
    """Return the key of compiled graphs for each device type; None for PyTorch's own policy."""
    return [None if bound is None else bound.distinct_fingerprint for bound in _bound_policies()]


def _replace_names() -> None:
    replaces_scalers = _installations[-1]._replaces_scalers
    for module, stand_ins in [*FUNCTIONS, *(SCALERS if replaces_scalers else ())]:
        _replaced.append(_torch.replace_names(module.__name__, **stand_ins))
    if not all(bound is None or bound.matches_torch for bound in _bound_policies()):
        _replaced.append(_torch.replace_regions(_enter, _exit))
    let_be_pickled(installed=replaces_scalers)


def _restore_names() -> None:
    let_be_pickled(installed=False)
    while _replaced:
        _replaced.pop()()


@functools.wraps(_torch.enter_region)
def _enter(region: torch.autocast) -> Any:
    """Enter a region with TorchScript's optimizer off: it knows only PyTorch's policy, and would apply that."""
    _optimized.outside.append(_torch.optimizes_torchscript())
    _torch.optimize_torchscript(False)
    return _torch.enter_region(region)


@functools.wraps(_torch.exit_region)
def _exit(region: torch.autocast, *exc_info: Any) -> Any:
    if _optimized.outside:  # empty for a region that is older than the installation
        _torch.optimize_torchscript(_optimized.outside.pop())
    return _torch.exit_region(region, *exc_info)


class _OptimizerFlags(threading.local):
    """This thread's flags of TorchScript's optimizer outside of each open region of PyTorch's."""

    def __init__(self) -> None:
        self.outside: list[bool] = []


_optimized = _OptimizerFlags()


def _bind_again() -> None:
    """Bind the policies again: an operation that they have a rule for may have been defined since."""
    with _lock:
        _put_in_force()
