"""A decorator with the result of a method while its scaler is disabled, so that methods need no check for it.

Invariant: only the result of a disabled scaler enters a compiled graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from precast import _torch

__all__ = ["when_disabled"]

Method = TypeVar("Method", bound=Callable[..., Any])


def when_disabled(answer: Callable[..., Any]) -> Callable[[Method], Method]:
    """Make a method of a disabled scaler return ``answer(*args, **kwargs)`` instead of its result.

    The method itself always runs uncompiled: the state of a scaler changes in each iteration, and a graph would be
    compiled again for each.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs) if self._enabled else answer(*args, **kwargs)

        _torch.never_compiled(method)
        return cast(Method, _torch.runs_uncompiled(chosen))

    return decorate
