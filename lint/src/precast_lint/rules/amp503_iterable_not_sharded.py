"""AMP503: an IterableDataset that each worker of a loader reads from the beginning."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.tensors import constant
from precast_lint.model import Applicability, Case, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted, walk

__all__ = ["RULE"]

_LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
_DATASETS = ("torch.utils.data.IterableDataset", "torch.utils.data.dataset.IterableDataset")
# Who shares the work, or makes random data, of which there can't be copies.
_SHARED = re.compile(r"worker|rank|shard|split|rand|seed|sampler|partition|islice")
_CUTS_TEXT = ("split", "rsplit", "splitlines", "splitext")
_COUNTS = ("os.cpu_count", "multiprocessing.cpu_count", "torch.get_num_threads")
_DEEP = 4


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each loader with workers of such a data set of this file."""
    for call, arguments in source.calls(*_LOADERS):
        if arguments.starred or "worker_init_fn" in arguments.keywords:
            continue
        if not _are_some(source, arguments.get("num_workers", 5), _DEEP):
            continue
        home = _class_of(source, arguments.get("dataset", 0))
        if home is not None and _reads_all(source, home):
            yield source.find(RULE, call)


def _are_some(source: Source, workers: Node | None, depth: int) -> bool:
    """Whether a number of workers is more than none: a number, that of the processors, or a part of it."""
    if workers is None or depth == 0:
        return False
    number = constant(source, workers)
    if number is not None:
        return number > 0
    if isinstance(workers, cst.Call):
        if source.names.builtin(workers.func) in ("min", "max", "int", "len"):
            return all(_are_some(source, arg.value, depth - 1) for arg in workers.args)
        return (source.origin(workers.func) or dotted(workers.func)) in _COUNTS
    if isinstance(workers, cst.BinaryOperation):
        return all(_are_some(source, n, depth - 1) for n in (workers.left, workers.right))
    if isinstance(workers, cst.BooleanOperation):
        return _are_some(source, workers.left, depth - 1)
    found = [value for value, _ in source.values.sources(workers)]
    return bool(found) and all(_are_some(source, value, depth - 1) for value in found)


def _class_of(source: Source, dataset: Node | None) -> cst.ClassDef | None:
    """The class of this file that a data set is made by."""
    call = source.values.constructed(dataset)
    binding = source.names.only_binding(call.func) if isinstance(call, cst.Call) else None
    node = binding.node if binding is not None and binding.kind == "class" else None
    return node if isinstance(node, cst.ClassDef) else None


def _reads_all(source: Source, home: cst.ClassDef) -> bool:
    is_iterable = len(home.bases) == 1 and source.origin(home.bases[0].value) in _DATASETS
    own = [s for s in home.body.body if isinstance(s, cst.FunctionDef)]
    has_iter = any(function.name.value == "__iter__" for function in own)
    return is_iterable and has_iter and not any(map(_SHARED.search, _words(source, home)))


def _words(source: Source, home: cst.ClassDef) -> Iterator[str]:
    """The names in a class; a method that only cuts a text says nothing of who reads what."""
    for node in walk(home):
        if isinstance(node, cst.Name):
            outer = source.parents[node]
            is_shuffle = node.value == "random" and _shuffles(outer)
            is_cut = isinstance(outer, cst.Attribute) and node.value in _CUTS_TEXT
            if not is_cut and not is_shuffle:
                yield node.value


def _shuffles(node: Node) -> bool:
    """`random.shuffle`, which changes the order alone."""
    return isinstance(node, cst.Attribute) and node.attr.value == "shuffle"


VALID = (
    Case("""
        from torch.utils.data import DataLoader, IterableDataset, get_worker_info

        class Lines(IterableDataset):
            def __init__(self, lines):
                self.lines = lines

            def __iter__(self):
                info = get_worker_info()
                yield from self.lines[info.id :: info.num_workers] if info else self.lines

        loader = DataLoader(Lines(lines), num_workers=4)
    """),
    Case(
        """
        from torch.utils.data import DataLoader, IterableDataset

        class Lines(IterableDataset):
            def __init__(self, lines):
                self.lines = lines

            def __iter__(self):
                yield from self.lines

        loader = DataLoader(Lines(lines))
        loader = DataLoader(Lines(lines), num_workers=0)
        loader = DataLoader(Lines(lines), num_workers=4, worker_init_fn=share)
        """,
        note="Without workers, or they share the work when they start.",
    ),
    Case("""
        import torch
        from torch.utils.data import DataLoader, IterableDataset

        class Noise(IterableDataset):
            def __iter__(self):
                while True:
                    yield torch.randn(3)

        loader = DataLoader(Noise(), num_workers=4)
    """),
    Case("""
        from torch.utils.data import DataLoader, Dataset

        class Lines(Dataset):
            def __getitem__(self, i):
                return self.lines[i]

        loader = DataLoader(Lines(), num_workers=4)
    """),
)

INVALID = (
    Case("""
        import random
        from torch.utils.data import DataLoader, IterableDataset

        class Lines(IterableDataset):
            def __init__(self, lines):
                self.lines = lines

            def __iter__(self):
                random.shuffle(self.lines)
                yield from self.lines

        loader = DataLoader(Lines(lines), num_workers=4)
    """),
    Case(
        """
        from torch.utils.data import DataLoader, IterableDataset

        class Lines(IterableDataset):
            def __init__(self, lines):
                self.lines = lines

            def __iter__(self):
                yield from self.lines

        dataset = Lines(lines)
        loader = DataLoader(dataset, batch_size=8, num_workers=4)
        """,
        count=1,
    ),
    Case(
        """
        import os
        from torch.utils.data import DataLoader, IterableDataset

        class Rows(IterableDataset):
            def __init__(self, files):
                self.files = files

            def __iter__(self):
                for file in self.files:
                    for line in open(file):
                        yield line.split(",")

        def make(files, workers=8):
            first = DataLoader(Rows(files), num_workers=os.cpu_count() // 2)
            return first, DataLoader(dataset=Rows(files), num_workers=min(workers, os.cpu_count()))
        """,
        count=2,
    ),
)

RULE = Rule(
    code="AMP503",
    name="iterable-dataset-not-sharded",
    severity=Severity.WARNING,
    fix=Applicability.NONE,
    message="each worker yields all of this data set: share it by `torch.utils.data.get_worker_info()`",
    what="A `DataLoader` with workers of an `IterableDataset` that does not ask which worker it is in.",
    why="Each worker has a copy of the data set and yields everything: an epoch has each example once for each worker.",
    fine="The data is made up, or shared in code that the rule can't see.",
    words=("IterableDataset num_workers",),
    check=check,
    valid=VALID,
    invalid=INVALID,
)
