"""Settings of PyTorch's compiler whose values depend on the policy in force when they are read.

Invariant: each setting is on the list of patches (`patch_list.py`), and the user's own value has priority.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from typing import Any, Final

import torch

from precast._torch.patches import _check_listed

__all__ = ["set_backward_autocast", "set_compile_cache_tag"]


# --- the compiler's cache on disk ---


class _ComputedTag(str):
    """A tag whose text is computed whenever the compiler's cache makes a key from it."""

    text: Callable[[], str]

    def __str__(self) -> str:
        return self.text()

    def __format__(self, spec: str) -> str:
        return format(self.text(), spec)

    def __reduce__(self) -> tuple[Any, ...]:  # the keys are digests of pickles
        return str, (self.text(),)


def set_compile_cache_tag(extra: Callable[[], str] | None) -> None:
    """Add the result of `extra` to the keys of the compiler's cache on disk; None removes it.

    `torch.compiler.config.cache_key_tag` is public. Private are that it may be more than plain text, and that it has a
    value for all threads with priority over later settings. The user's own tag stays a part of it (2.13).
    """
    _check_listed("torch.compiler.config", "cache_key_tag")
    config: Any = torch.compiler.config
    entry = config._config["cache_key_tag"]
    unset = torch.utils._config_module._UNSET_SENTINEL

    def user_tag() -> Any:
        override = entry.user_override
        return override.get() if isinstance(override, ContextVar) else override

    def text() -> str:
        assert extra is not None
        tags = user_tag(), entry.env_value_default, entry.default
        own = next(t for t in tags if t is not unset and not isinstance(t, _ComputedTag))
        return str(own) + extra()

    tag = _ComputedTag()
    tag.text = text
    entry.env_value_force = unset if extra is None else tag
    if extra is None and isinstance(
        user_tag(), _ComputedTag
    ):  # `config.patch` restores what it read
        config.cache_key_tag = entry.default


# --- the backward passes of compiled functions ---

_COMPUTED_ENTRY: Final = "_BackwardAutocastEntry"


def set_backward_autocast(is_off: Callable[[], bool] | None) -> None:
    """Differentiate functions that are compiled while `is_off()` with autocast off; None ends that.

    The first function is in force until None.

    PyTorch records the backward pass of a compiled function in the regions around its forward (2.11 to 2.15). An
    uncompiled function has its backward run in the regions around `backward()`: normally none.
    `torch._functorch.config` has a setting for this; that its default can be replaced is not public. A user's setting
    has priority.
    """
    _check_listed("torch._functorch.config", "backward_pass_autocast")
    if is_off is None and "torch._functorch.config" not in sys.modules:
        return
    config: Any = import_module("torch._functorch.config")  # PyTorch loads it with the compiler
    entry = config._config.get("backward_pass_autocast")
    if entry is None:
        return
    if is_off is None:
        if type(entry).__name__ == _COMPUTED_ENTRY:
            entry.__class__ = type(entry).__base__
        return
    if type(entry).__name__ == _COMPUTED_ENTRY:
        return
    # Keys of caches are digests of pickles, so the values must be plain strings. `config.patch` later stores as
    # the user's setting what it read: these two objects, which nobody else has, are recognized there by identity.
    off, plain = "".join("off"), "".join(entry.default)
    unset = torch.utils._config_module._UNSET_SENTINEL

    def user_override(self: Any) -> Any:
        # Before PyTorch 2.13 a value, and of the class alone until a user has set one.
        stored = self.__dict__.get("user_override", unset)
        is_variable = isinstance(stored, ContextVar)
        if not any((stored.get() if is_variable else stored) is own for own in (off, plain)):
            return stored
        if is_variable:
            stored.set(unset)
            return stored
        return unset

    members = {
        "default": property(lambda _: off if is_off() else plain),
        "user_override": property(
            user_override, lambda self, value: self.__dict__.update(user_override=value)
        ),
    }
    entry.__class__ = type(_COMPUTED_ENTRY, (type(entry),), members)
