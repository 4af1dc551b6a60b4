"""One walk over any nesting of containers, that breaks none of them."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from precast._internal.pytree import map_tensors


class Point(NamedTuple):
    x: Any
    y: Any = 0


class TaggedPoint(Point):
    """A named tuple whose constructor takes other arguments than its fields."""

    def __new__(cls, both: Any) -> TaggedPoint:
        return super().__new__(cls, both, both)


class Pair(tuple):
    def __new__(cls, first: Any, second: Any) -> Pair:
        return super().__new__(cls, (first, second))


class Tagged(list):
    def __init__(self, tag: str, items: Any) -> None:
        super().__init__(items)
        self.tag = tag


@dataclasses.dataclass
class Batch:
    image: Any
    name: str = "a"
    made: int = dataclasses.field(init=False, default=0)
    never_set: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.made += 1


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenBatch:
    image: Any
    name: str = dataclasses.field(init=False, default="a")


class Output(collections.OrderedDict):
    """As the outputs of popular model libraries: an ordered dict whose keys are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


def make_output(t: torch.Tensor) -> Output:
    output = Output()
    output["loss"], output["n"] = t, 3
    return output


BUILDERS = {
    "list": lambda t: [1, t],
    "tuple": lambda t: (t, "x"),
    "deque": lambda t: collections.deque([t, 1], maxlen=5),
    "named tuple": Point,
    "named tuple with its own constructor": TaggedPoint,
    "tuple subclass with its own constructor": lambda t: Pair(t, None),
    "list subclass with attributes": lambda t: Tagged("kept", [t]),
    "dict": lambda t: {"a": t, "b": 1},
    "ordered dict": lambda t: collections.OrderedDict(b=t, a=1),
    "default dict": lambda t: collections.defaultdict(list, a=t),
    "read-only mapping": lambda t: types.MappingProxyType({"a": t}),
    "user dict": lambda t: collections.UserDict(a=t),
    "dict with attributes": make_output,
    "dataclass": Batch,
    "frozen dataclass with slots": FrozenBatch,
    "structure from C": lambda t: torch.max(t.expand(2, 3), dim=0),
}


def leaves(value: Any) -> list[Any]:
    if isinstance(value, collections.abc.Mapping):
        return [leaf for item in value.items() for leaf in item]
    if dataclasses.is_dataclass(value):
        return [getattr(value, f.name, "unset") for f in dataclasses.fields(value)]
    return list(value)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("kind", BUILDERS)
def test_every_container_keeps_its_type_and_other_contents(kind: str) -> None:
    tensor = torch.randn(3)
    value = BUILDERS[kind](tensor)
    result = map_tensors(value, double)
    assert type(result) is type(value)
    wanted = [leaf * 2 if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves(value)]
    assert any(isinstance(leaf, torch.Tensor) for leaf in wanted)
    assert all(same(a, b) for a, b in zip(wanted, leaves(result), strict=True))
    assert getattr(result, "__dict__", {}).keys() == getattr(value, "__dict__", {}).keys()


def test_a_container_that_holds_itself_is_walked_once() -> None:
    @dataclasses.dataclass
    class Node:
        value: torch.Tensor
        parent: Node | None = None
        children: list[Node] = dataclasses.field(default_factory=list)

    root = Node(torch.ones(2))
    root.children = [Node(torch.ones(2), root), Node(torch.ones(2), root)]
    assert map_tensors(root, lambda t: t) is root
    doubled = map_tensors(root, lambda t: t * 2)
    assert [child.value[0].item() for child in (doubled, *doubled.children)] == [2, 2, 2]
    assert all(child.parent is root for child in doubled.children)
    assert root.value[0] == 1
    loop: list[Any] = [torch.ones(2)]
    loop.append({"loop": loop})
    assert map_tensors(loop, lambda t: t * 2)[0][0] == 2


@pytest.mark.parametrize("kind", BUILDERS)
def test_an_unchanged_container_is_returned_itself(kind: str) -> None:
    value = BUILDERS[kind](torch.randn(3))
    assert map_tensors(value, lambda t: t) is value


@pytest.mark.parametrize("kind", BUILDERS)
def test_the_original_is_not_modified(kind: str) -> None:
    tensor = torch.randn(3)
    value = BUILDERS[kind](tensor)
    before = leaves(value)
    map_tensors(value, double)
    assert all(a is b for a, b in zip(before, leaves(value), strict=True))


def test_what_a_container_carries_besides_its_items_survives() -> None:
    one = torch.ones(1)
    assert map_tensors(collections.defaultdict(list, a=one), double).default_factory is list
    assert map_tensors(collections.deque([one], maxlen=5), double).maxlen == 5
    assert map_tensors(Tagged("kept", [one]), double).tag == "kept"
    assert torch.equal(map_tensors(make_output(one), double).loss, one * 2)
    assert map_tensors(Batch(one), double).made == 1  # __post_init__ did not run again


def test_only_the_branch_that_changed_is_rebuilt() -> None:
    untouched = [1, {"a": "b"}]
    result = map_tensors([untouched, torch.ones(1)], double)
    assert result[0] is untouched


def test_a_packed_sequence_stays_one() -> None:
    packed = pack_sequence([torch.randn(3, 2), torch.randn(5, 2)], enforce_sorted=False)
    lower = map_tensors(packed, lambda t: t.bfloat16() if t.is_floating_point() else t)
    assert isinstance(lower, PackedSequence)
    assert lower.data.dtype is torch.bfloat16
    assert lower.batch_sizes is packed.batch_sizes
    assert lower.unsorted_indices is packed.unsorted_indices
    padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(lower)
    assert padded.shape == (5, 2, 2)
    assert lengths.tolist() == [3, 5]


class Custom:
    def __iter__(self) -> Any:
        raise AssertionError("must not be iterated")


@pytest.mark.parametrize(
    "leaf",
    [
        None,
        3,
        "text",
        b"bytes",
        np.ones(3),
        np.array(["a"], dtype=object),
        {1, 2},
        frozenset({1}),
        Custom(),
        Batch,
        range(3),
        torch.float16,
        torch.Size([2, 3]),
        torch.nn.ModuleList([torch.nn.Linear(1, 1)]),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_everything_else_passes_through(leaf: Any) -> None:
    assert map_tensors(leaf, double) is leaf
    assert map_tensors([leaf, torch.ones(1)], double)[0] is leaf


def test_a_generator_is_not_consumed() -> None:
    generator = (t for t in [torch.ones(1)])
    assert map_tensors((generator, torch.ones(1)), double)[0] is generator
    assert len(list(generator)) == 1


def test_leaves_can_have_a_function_of_their_own() -> None:
    result = map_tensors([1, (torch.ones(1), 2)], double, map_other=lambda leaf: leaf + 1)
    assert result == [2, (torch.full((1,), 2.0), 3)]


nested = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=2), st.just("TENSOR")),
    lambda child: st.one_of(
        st.lists(child, max_size=3),
        st.tuples(child, child),
        st.builds(Point, child, child),
        st.dictionaries(st.text(max_size=2), child, max_size=3),
        st.builds(Batch, child),
        st.builds(FrozenBatch, child),
        st.builds(lambda c: collections.defaultdict(int, k=c), child),
    ),
    max_leaves=12,
)


def flatten(value: Any) -> list[Any]:
    """The leaves, in order, with the type of every container on the way: an independent walk."""
    if isinstance(value, str) or not (
        isinstance(value, list | tuple | dict) or dataclasses.is_dataclass(value)
    ):
        return [value]
    return [type(value), *(leaf for child in leaves(value) for leaf in flatten(child))]


@given(nested)
def test_any_nesting_changes_in_its_tensors_only(template: Any) -> None:
    place = torch.ones(1)
    value = map_tensors(
        template, double, map_other=lambda leaf: place if leaf == "TENSOR" else leaf
    )
    before, after = flatten(value), flatten(map_tensors(value, double))
    assert all(
        torch.equal(b, a * 2) if isinstance(a, torch.Tensor) else b == a
        for a, b in zip(before, after, strict=True)
    )


class Identity(torch.autograd.Function):
    """Shows what torch's own cast walk makes of an argument."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, value: Any) -> torch.Tensor:
        Identity.seen = value
        return torch.ones(1)


def torch_walk(value: Any) -> Any:
    with torch.autocast("cpu"):
        Identity.apply(value)
    return Identity.seen


def test_where_torch_breaks_containers() -> None:
    half = torch.ones(2, dtype=torch.bfloat16)

    with pytest.raises(TypeError):  # type(value)(generator): one argument for two fields
        torch_walk(Pair(half, half))
    broken = torch_walk(Point(half, 1))
    assert isinstance(
        broken.x, types.GeneratorType
    )  # the same call, silently wrong: y has a default
    with pytest.raises(AssertionError, match="length 2"):
        torch_walk(pack_sequence([half]))
    assert torch_walk(Batch(half)).image.dtype is torch.bfloat16  # not looked into
    assert type(torch_walk(collections.OrderedDict(a=half))) is dict  # no longer ordered
    assert isinstance(torch_walk({1, 2}), types.GeneratorType)  # no longer a set

    def cast(value: Any) -> Any:
        return map_tensors(value, torch.Tensor.float)

    assert cast(Pair(half, half))[1].dtype is torch.float32
    assert cast(Point(half, 1)).x.dtype is torch.float32
    assert cast(Point(half, 1)).y == 1
    assert cast(Batch(half)).image.dtype is torch.float32
    assert type(cast(collections.OrderedDict(a=half))) is collections.OrderedDict
    assert cast({1, 2}) == {1, 2}
