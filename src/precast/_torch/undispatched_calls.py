"""Calls for which PyTorch does not ask the class of a tensor: of scripted functions, and of `torch.func`.

Invariant: each patch is on the list of patches (`patch_list.py`).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch

from precast._torch.patches import SharedPatch, Stop, replace_names

__all__ = ["on_undispatched_call"]

_Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def on_undispatched_call(call: _Call) -> None:
    """Run each call of a scripted or traced function as ``call(function, args, kwargs)``; `function` is not patched.

    The same holds for the functions with which transforms of `torch.func` wrap their tensors.
    """
    _calls.set(call)


def _patch_calls(listeners: list[_Call]) -> list[Stop]:
    run_script: Any = torch.jit.ScriptFunction.__call__

    def __call__(function: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return listeners[0](run_script.__get__(function), args, kwargs)

    def replaced(owner: str, name: str) -> Stop:
        wrap_tensor = getattr(pkgutil.resolve_name(owner), name)

        @wraps(wrap_tensor)
        def wrapper(*args: Any) -> Any:
            # `is_dynamo_compiling` is a constant where the compiler traces, so nothing of this enters a graph.
            if torch.compiler.is_dynamo_compiling():
                return wrap_tensor(*args)
            return listeners[0](wrap_tensor, args, {})

        return replace_names(owner, **{name: wrapper})

    return [
        replace_names("torch.jit:ScriptFunction", __call__=__call__),
        replaced("torch._functorch.vmap", "_add_batch_dim"),
        replaced("torch._functorch.eager_transforms", "_wrap_for_grad"),
    ]


_calls: Final = SharedPatch(_patch_calls)
