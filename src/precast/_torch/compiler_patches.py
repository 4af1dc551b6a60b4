"""Settings of PyTorch's compiler whose values depend on the policy in force when they are read.

Invariant: each setting is on the list of patches (`patch_list.py`), and the user's own value comes first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch

from precast._torch.patches import _check_listed

__all__ = ["set_backward_autocast", "set_compile_cache_tag"]


# --- the compiler's cache on disk ---


class _Tag(str):
    """A tag whose text is asked for anew whenever the compiler's cache makes a key of it."""

    said: Callable[[], str]

    def __str__(self) -> str:
        return self.said()

    def __format__(self, spec: str) -> str:
        return format(self.said(), spec)

    def __reduce__(self) -> tuple[Any, ...]:  # the keys are digests of pickles
        return str, (self.said(),)


def set_compile_cache_tag(extra: Callable[[], str] | None) -> None:
    """Adds what `extra` returns to the key under which compiled code is kept on disk; None takes that away again.

    `torch.compiler.config.cache_key_tag` is public. It is not public that it may be more than plain text, nor that it
    has a value for all threads which no later setting hides. The user's own tag stays a part of it (2.13).
    """
    _check_listed("torch.compiler.config", "cache_key_tag")
    config: Any = torch.compiler.config
    entry = config._config["cache_key_tag"]
    unset = torch.utils._config_module._UNSET_SENTINEL

    def users() -> Any:
        own = entry.user_override
        return own.get() if isinstance(own, ContextVar) else own

    def said() -> str:
        assert extra is not None
        asked = users(), entry.env_value_default, entry.default
        return str(next(t for t in asked if t is not unset and not isinstance(t, _Tag))) + extra()

    tag = _Tag()
    tag.said = said
    entry.env_value_force = unset if extra is None else tag
    if extra is None and isinstance(users(), _Tag):  # `config.patch` puts back what it read
        config.cache_key_tag = entry.default


# --- the backward passes of compiled functions ---


class _BackwardAutocast(str):
    """A setting that is "off" where `is_off()`, and else PyTorch's default."""

    is_off: Callable[[], bool]
    default: str
    """PyTorch's."""

    def current(self) -> str:
        """Return the setting for what is compiled now."""
        return "off" if self.is_off() else self.default

    def __eq__(self, other: object) -> bool:
        return self.current() == other

    def __hash__(self) -> int:
        return hash(self.current())

    def __str__(self) -> str:
        return self.current()

    def __repr__(self) -> str:
        return repr(self.current())

    def __reduce__(self) -> tuple[Any, ...]:  # keys of caches are digests of pickles
        return str, (self.current(),)


def set_backward_autocast(is_off: Callable[[], bool] | None) -> None:
    """Have functions that are compiled while `is_off()` differentiated with autocast off; None ends that.

    PyTorch records the backward pass of a compiled function in the regions around its forward (2.11 to 2.15), where an
    uncompiled one runs in those around `backward()`, and there are none. `torch._functorch.config` has a setting for
    it; it is not public that its default can be replaced. What a user sets comes first.
    """
    _check_listed("torch._functorch.config", "backward_pass_autocast")
    if is_off is None and "torch._functorch.config" not in sys.modules:
        return
    config: Any = import_module("torch._functorch.config")  # PyTorch loads it with the compiler
    entry = config._config.get("backward_pass_autocast")
    if entry is None:
        return
    plain = entry.default.default if type(entry.default) is _BackwardAutocast else entry.default
    entry.default = plain
    if is_off is not None:
        entry.default = _BackwardAutocast(plain)
        entry.default.is_off, entry.default.default = is_off, plain
