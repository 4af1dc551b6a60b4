"""Products that no table names: searched among all operators of PyTorch, with arguments made up from their schemas.

Each operator runs in a process of its own: with such arguments, private operators may end the process.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import precast
from precast import _torch
from precast._internal.pytree import map_tensors, tensors_in
from precast.policy.policy import Policy, expanded_rules
from tests.support.products import has_product

SHAPES = (
    # matrices, batches of them, vectors
    *((8, 8), (2, 8, 8), (1, 2, 8, 8), (8,)),
    # an image with a kernel, in one to three dimensions
    *((1, 4, 4), (4, 4, 1), (1, 4, 4, 4), (4, 4, 1, 1), (1, 4, 3, 3, 3), (4, 4, 1, 1, 1)),
)
VALUES = {"padding": 0, "output_padding": 0, "equation": "ij,jk->ik"}
SECONDS = 20

DEFAULT = Policy.load("default")
NAMED = {name for device in ("cpu", "cuda") for name in expanded_rules(DEFAULT, device)[0]}

BELOW = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "aten::scaled_dot_product_attention",
    "aten::_slow_conv2d_forward": "aten::conv2d",
    "aten::mkldnn_convolution": "aten::conv2d",
    "aten::slow_conv3d": "aten::conv3d",
    "aten::slow_conv3d_forward": "aten::conv3d",
    "aten::slow_conv_dilated2d": "aten::conv2d",
    "aten::slow_conv_dilated3d": "aten::conv3d",
    "aten::slow_conv_transpose2d": "aten::conv_transpose2d",
    "aten::thnn_conv2d": "aten::conv2d",
    "aten::_compute_linear_combination": "aten::matrix_exp",
}
"""Products that run in float32 when they are called themselves. Programs call the operations that call them."""


def operators() -> list[str]:
    """Operators without a row that take at least two tensors; neither derivatives nor what calls other operators."""
    names = []
    for name in sorted(_torch.operator_names() - NAMED):
        overload = _torch.find_overload(name) if name.startswith("aten::") else None
        if overload is None or "backward" in name or _torch.is_composite(overload):
            continue
        schema = _torch.schema_of(overload)
        kinds = [str(argument.type) for argument in schema.arguments]
        takes_two = sum("Tensor" in kind for kind in kinds) > 1 or "List[Tensor]" in kinds
        writes = any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
        if takes_two and not writes and torch.Tag.pointwise not in overload.tags:
            names.append(name)
    return names


def calls_of(name: str) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Calls of an operator that PyTorch accepts, with float32 tensors."""
    needed = [a for a in schema_of(name).arguments if not a.has_default_value()]
    varied = [a.name for a in needed if str(a.type) == "Tensor"][:3]
    for shapes in itertools.product(SHAPES, repeat=len(varied)):
        if shapes[2:] and shapes[2] not in (*shapes[:2], (8,)):
            continue
        shape_of = dict(zip(varied, shapes, strict=True))
        rank, generator = max(map(len, shapes), default=2) - 2, torch.Generator().manual_seed(0)
        values = {a.name: value(a, shape_of.get(a.name, (8,)), rank, generator) for a in needed}
        args = [values[a.name] for a in needed if not a.kwarg_only]
        kwargs = {a.name: values[a.name] for a in needed if a.kwarg_only}
        try:
            result = _torch.find_overload(name)(*args, **kwargs)
        except Exception:  # these shapes do not fit
            continue
        if tensors_in(result):
            yield args, kwargs


def schema_of(name: str) -> Any:
    return _torch.schema_of(_torch.find_overload(name))


def value(argument: Any, shape: Sequence[int], rank: int, generator: torch.Generator) -> Any:
    kind = str(argument.type)
    if kind == "Tensor":
        return torch.rand(*shape, generator=generator) + 0.5
    if kind == "List[Tensor]":
        return [torch.rand(8, 8, generator=generator) for _ in range(2)]
    if kind.startswith("Optional"):
        return None
    single = VALUES.get(argument.name, {"bool": False, "float": 1.0, "number": 1.0}.get(kind, 1))
    return [single] * max(1, rank) if kind.startswith("List") else single


def is_product_in_float32(name: str) -> bool:
    """Return True if an operator is a product that runs in float32 in a region, and can run in 16 bits."""
    function = _torch.find_overload(name)
    for call in itertools.islice(calls_of(name), 6):

        def run(values: Sequence[Tensor], call: Any = call) -> Any:
            remaining = iter(values)
            args, kwargs = map_tensors(call, lambda _: next(remaining))
            return function(*args, **kwargs)

        tensors = tensors_in(call)
        if not has_product(run, tensors):
            continue
        with precast.autocast("cpu", policy=DEFAULT):
            inside = run(tensors)
        if not all(map(torch.equal, tensors_in(inside), tensors_in(run(tensors)))):
            return False  # operations inside of it run in 16 bits
        try:
            run([tensor.bfloat16() for tensor in tensors])
        except RuntimeError:
            return False
        return True
    return False


def in_fork(name: str) -> bool:
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        code = 0
        try:
            faulthandler.disable()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            code = 10 if is_product_in_float32(name) else 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10


def products(names: list[str]) -> list[str]:
    threads = torch.get_num_threads()
    with precast.autocast("cpu", policy=DEFAULT):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))  # its first use takes longer
    torch.set_num_threads(1)  # a forked process has no other threads
    try:
        return [name for name in names if in_fork(name)]
    finally:
        torch.set_num_threads(threads)


def test_no_product_that_programs_call_is_without_a_row() -> None:
    assert set(products(operators())) - BELOW.keys() == set()


def test_the_search_finds_products_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "DEFAULT", Policy("none", {}))
    named = {
        f"aten::{name}" for name in ("mm", "linear", "conv2d", "einsum", "baddbmm", "_grouped_mm")
    }
    others = {
        f"aten::{name}"
        for name in ("dot", "mv", "outer", "native_layer_norm", "cdist", "where.self")
    }
    assert set(products(sorted(named | others))) == named
