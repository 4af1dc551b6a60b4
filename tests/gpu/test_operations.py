"""On a GPU: every operation of which PyTorch has samples gives the values and gradients of torch.autocast to the bit.

Samples are those of PyTorch's own tests of operations (OpInfo), each in a mixture of dtypes that is drawn from
`PRECAST_PROGRAMS_SEED`. What PyTorch computes twice with other bits (atomic additions) is compared within the
distance of its own two results. On the pretended device some operations are drawn.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import precast
from precast._internal.pytree import tensors_in
from precast.engine import registration
from tests.conftest import PROGRAMS_SEED
from tests.gpu.networks import equal
from tests.support import pretended_cuda

# PyTorch warns of some operations once in a process.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
PARTS = 24
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SAMPLES = 3  # of each operation
DRAWN = 2  # operations of a part on the pretended device
UNINITIALIZED = re.compile(r"(new_)?empty|resize_|as_strided")
"""Operations whose results have memory that nothing was written to, on copies of the samples."""


class Call(NamedTuple):
    """One call of an operation in a region."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lower: torch.dtype

    def __str__(self) -> str:
        dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors_in((self.args, self.kwargs))]
        return f"{self.name} of {', '.join(dtypes)} in a {self.lower} region"


class Answer(NamedTuple):
    """The results and the gradients of a call, or the first line of its error."""

    tensors: list[Tensor]
    error: str


def calls(part: int) -> Iterator[Call]:
    """The calls of every 24th operation, from one of the first 24 on."""
    from torch.testing._internal.common_methods_invocations import op_db

    operations = [
        op for op in op_db if torch.float32 in op.dtypes and not UNINITIALIZED.match(op.name)
    ]
    of_part = operations[part::PARTS]
    state = random.Random(f"{PROGRAMS_SEED} {part}")
    for op in state.sample(of_part, DRAWN) if pretended_cuda.is_loaded() else of_part:
        inputs = op.sample_inputs("cuda", torch.float32, requires_grad=op.supports_autograd)
        for sample in itertools.islice(inputs, SAMPLES):
            args = (sample.input, *sample.args)
            dtypes = itertools.cycle(state.choices(DTYPES, k=3))
            cast = partial(_leaf, dtypes=dtypes)
            args, kwargs = torch.utils._pytree.tree_map_only(Tensor, cast, (args, sample.kwargs))
            yield Call(op.name, op.op, args, kwargs, state.choice(DTYPES[1:]))


def _leaf(tensor: Tensor, dtypes: Iterator[torch.dtype]) -> Tensor:
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return tensor
    return tensor.detach().to(next(dtypes)).requires_grad_(tensor.requires_grad)


def answer(call: Call, region: Callable[..., AbstractContextManager[object]]) -> Answer:
    """The results of a call on new leaves, and the gradients of the leaves."""
    torch.manual_seed(0)
    copy = lambda t: t.detach().clone().requires_grad_(t.requires_grad)  # noqa: E731
    args, kwargs = torch.utils._pytree.tree_map_only(Tensor, copy, (call.args, call.kwargs))
    leaves = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
    try:
        with region("cuda", call.lower):
            results = list(tensors_in(call.function(*args, **kwargs)))
        roots = [t for t in results if t.requires_grad and t.layout is torch.strided]
        gradients = (
            torch.autograd.grad(
                roots, leaves, [torch.ones_like(t) for t in roots], allow_unused=True
            )
            if roots and leaves
            else ()
        )
    except Exception as error:  # any of PyTorch's
        return Answer([], f"{type(error).__name__}: {error}".splitlines()[0])
    return Answer([t.detach() for t in (*results, *gradients) if t is not None], "")


def _near(found: Tensor, one: Tensor, other: Tensor) -> bool:
    """Whether a result is as near to two results of PyTorch as these are to each other, times 8."""
    if found.dtype is not one.dtype or found.shape != one.shape:
        return False
    distance = (one.double() - other.double()).nan_to_num().abs().max()
    return bool(((found.double() - one.double()).nan_to_num().abs() <= 8 * distance).all())


@pytest.mark.parametrize("engine", registration.ENGINES)
@pytest.mark.parametrize("part", range(PARTS))
def test_values_and_gradients(
    part: int, engine: str, record_property: Callable[[str, object], None]
) -> None:
    ours = partial(precast.autocast, policy="torch")
    compared, wrong = 0, []
    for call in calls(part):
        registration.unregister()
        expected, again = answer(call, torch.autocast), answer(call, torch.autocast)
        with registration.use_engine(engine):
            actual = answer(call, ours)
        same = actual.error == expected.error and len(actual.tensors) == len(expected.tensors)
        triples = zip(actual.tensors, expected.tensors, again.tensors, strict=False)
        if not same or not all(
            equal(a, b) if equal(b, c) else _near(a, b, c) for a, b, c in triples
        ):
            wrong.append(f"{call}: {actual.error or 'other values'}; {expected.error}")
        compared += 1
    record_property("cases", compared)
    assert compared
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", range(PARTS))
def test_the_default_policy_computes_what_autocast_does(
    part: int, record_property: Callable[[str, object], None]
) -> None:
    """All that PyTorch's region computes, forward and backward, with results of the same sizes."""
    compared, wrong = 0, []
    for call in calls(part):
        expected = answer(call, torch.autocast)
        if expected.error:
            continue
        actual = answer(call, precast.autocast)
        if actual.error or [t.shape for t in actual.tensors] != [t.shape for t in expected.tensors]:
            wrong.append(f"{call}: {actual.error or 'other sizes'}")
        compared += 1
    record_property("cases", compared)
    assert not wrong, "\n".join(wrong)
