"""A decorator that says what a method returns while its scaler is off, so that no method has to ask whether it is.

Invariants: only the answer of a scaler that is off enters a compiled graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from precast import _torch

__all__ = ["when_disabled"]

Method = TypeVar("Method", bound=Callable[..., Any])


def when_disabled(answer: Callable[..., Any]) -> Callable[[Method], Method]:
    """Has a method of a scaler that is off return ``answer(*args, **kwargs)`` in place of its own result.

    The method itself always runs uncompiled: what a scaler remembers changes in each iteration, and a graph would
    have to be compiled again for it.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs) if self._enabled else answer(*args, **kwargs)

        _torch.never_compiled(method)
        return cast(Method, _torch.runs_uncompiled(chosen))

    return decorate
