"""AMP503: an IterableDataset that each worker of a loader reads from the beginning."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precast_lint.meaning.functions import called_method
from precast_lint.meaning.regions import arguments_of
from precast_lint.meaning.tensors import constant
from precast_lint.model import Applicability, Finding, Rule, Severity
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, dotted, strings, walk
from precast_lint.rules.data_set_cases import INVALID, VALID

__all__ = ["RULE"]

_LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
_DATASETS = ("torch.utils.data.IterableDataset", "torch.utils.data.dataset.IterableDataset")
# Who shares the work, or makes random data, of which there can't be copies.
_SHARED = re.compile(r"worker|rank|shard|split|rand|seed|sampler|partition|islice")
_CUTS_TEXT = ("split", "rsplit", "splitlines", "splitext")
# A file of a data set that lies in several, or all of them.
_FILES = re.compile(r"_?(shards?(_?(files?|paths?|list))?|seed)")
_READS = ("sorted", "list", "tuple", "iter", "open", "str", "enumerate")
_OPENS = (
    *("gzip.open", "bz2.open", "lzma.open", "io.open", "numpy.load", "torch.load", "pathlib.Path"),
    *("tarfile.open", "pandas.read_csv", "pandas.read_parquet", "copy.copy", "json.load"),
)
_READ_METHODS = ("open", "read_bytes", "read_text")
_GENERATORS = (
    *("random.Random", "numpy.random.default_rng", "numpy.random.RandomState", "torch.Generator"),
    "numpy.random.Generator",
)
_ORDERS = ("torch.randperm", "numpy.random.permutation", "numpy.random.shuffle")
_SEEDS = ("random.seed", "numpy.random.seed", "torch.manual_seed")
_INDICES = ("random.randrange", "random.randint")
_COUNTS = ("os.cpu_count", "multiprocessing.cpu_count", "torch.get_num_threads")
_DEEP = 4


def check(source: Source) -> Iterator[Finding]:
    """Yields a finding for each loader with workers of such a data set of this file."""
    for call, _ in source.calls(*_LOADERS):
        arguments = arguments_of(source, call)
        if (
            arguments.starred
            or _are_changed(source, call)
            or "worker_init_fn" in arguments.keywords
        ):
            continue
        if not _are_some(source, arguments.get("num_workers", 5), _DEEP):
            continue
        home = _class_of(source, arguments.get("dataset", 0))
        if home is not None and _reads_all(source, home):
            yield source.find(RULE, call)


def _are_changed(source: Source, call: cst.Call) -> bool:
    """Whether the table in `DataLoader(data, **options)` may get workers, or a function for them, after it is made."""
    for table in (arg.value for arg in call.args if arg.star == "**"):
        if not isinstance(table, cst.Name):
            return not isinstance(table, (cst.Call, cst.Dict))
        home = source.scopes.scope_of[table].home(table.value)
        uses = source.scopes.references(home, table.value) if home is not None else ()
        if any(_may_change(source.parents.get(use)) for use in uses):
            return True
    return False


def _may_change(outer: Node | None) -> bool:
    """Whether what is done with a table may put workers in, or take them away."""
    if isinstance(outer, cst.Subscript):
        index = outer.slice[0].slice
        name = strings(index.value) if isinstance(index, cst.Index) else None
        return name is None or name in ("num_workers", "worker_init_fn")
    if isinstance(outer, cst.Attribute):
        return outer.attr.value not in ("get", "items")
    return isinstance(outer, cst.Arg) and outer.star != "**"


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
    """Whether a data set, with its bases in this file, has no word of who reads what."""
    family = (home, *source.values.family.bases(home))
    origins = [_base(source, base.value) for one in family for base in one.bases]
    foreign = [origin for origin in origins if origin is not None]
    own = [s for one in family for s in one.body.body if isinstance(s, cst.FunctionDef)]
    if len(origins) != len(family) or len(foreign) != 1 or foreign[0] not in _DATASETS:
        return False
    if not any(function.name.value == "__iter__" for function in own):
        return False
    return not any(
        any(map(_SHARED.search, _words(source, one))) or any(map(_picks, walk(one)))
        for one in family
    )


def _base(source: Source, base: Node) -> str | None:
    """What a base is that is no class of this file, with or without what it yields: `IterableDataset[str]`."""
    name = base.value if isinstance(base, cst.Subscript) else base
    binding = source.names.only_binding(name)
    is_own = binding is not None and binding.kind == "class"
    return None if is_own else source.origin(name) or ""


def _words(source: Source, home: cst.ClassDef) -> Iterator[str]:
    """The names in a class that may say who reads what.

    A method that cuts a text says nothing of it, nor do a changed order and a list of files that is only read.
    """
    for node in walk(home):
        if isinstance(node, cst.Name):
            outer = source.parents[node]
            is_cut = isinstance(outer, cst.Attribute) and node.value in _CUTS_TEXT
            if not is_cut and not _is_of_order(source, node) and not _is_only_read(source, node):
                yield node.value


def _picks(node: Node) -> bool:
    """Whether an expression may pick a part by its place: `files[first::count]`, `i % count`."""
    if isinstance(node, cst.Slice):
        return node.step is not None
    if not isinstance(node, cst.BinaryOperation) or not isinstance(node.operator, cst.Modulo):
        return False
    return strings(node.left) is None


def _is_of_order(source: Source, name: cst.Name) -> bool:
    """Whether a name is in what changes the order alone.

    `random.shuffle(files)`, `random.Random(seed).shuffle(files)`, and a place in a buffer that the same loop fills.
    """
    inner: Node = name
    for outer in source.around(name):
        if isinstance(outer, cst.Attribute) and outer.attr.value == "shuffle":
            return inner is outer.value
        if isinstance(outer, cst.Call):
            origin = source.origin(outer.func)
            if origin in _ORDERS or origin in _SEEDS:
                return True
            generator = _generator(source, outer)
            if generator is outer:  # `random.Random(seed).shuffle(files)`
                return _orders(source, generator)
            if generator is not None:
                return _only_orders(source, generator)
        is_called = isinstance(outer, cst.Call) and inner is outer.func
        if is_called and source.origin(inner) in _INDICES:
            return _is_place_in_buffer(source, outer)
        if isinstance(outer, cst.BaseStatement):
            return False
        inner = outer
    return False


def _generator(source: Source, call: cst.Call) -> Node | None:
    """The variable of a generator of random numbers that a call makes, or is a method of; the call if it has none."""
    if source.origin(call.func) in _GENERATORS:
        assign = source.parents.get(call)
        is_one = isinstance(assign, cst.Assign) and len(assign.targets) == 1
        return assign.targets[0].target if is_one else call  # type: ignore[union-attr]
    owner = call.func.value if isinstance(call.func, cst.Attribute) else None
    made = source.values.constructed(owner) if owner is not None else None
    is_made = isinstance(made, cst.Call) and source.origin(made.func) in _GENERATORS
    return owner if is_made and source.origin(owner) is None else None


def _only_orders(source: Source, generator: Node) -> bool:
    """Whether a generator of random numbers only says in which order something comes."""
    place = source.values.variable(generator)
    if place is None:
        return False
    kind = type(generator)
    uses = [n for n in source.all(kind) if source.values.variable(n) == place]
    return all(_orders(source, use) for use in uses)


def _orders(source: Source, use: Node) -> bool:
    """Whether a use of a generator shuffles, draws a place in a buffer, is a seed, or makes it."""
    outer = source.parents.get(use)
    call = source.parents.get(outer) if outer is not None else None
    if isinstance(outer, cst.AssignTarget):
        return True
    if isinstance(outer, cst.Arg) and isinstance(call, cst.Call):
        return source.origin(call.func) in _ORDERS
    if not isinstance(outer, cst.Attribute) or not isinstance(call, cst.Call):
        return False
    if outer.attr.value in ("randrange", "randint", "integers"):
        return _is_place_in_buffer(source, call)
    return outer.attr.value in ("shuffle", "permutation", "seed", "manual_seed")


def _is_place_in_buffer(source: Source, call: Node) -> bool:
    """Whether `random.randrange(len(buffer))` is in a loop over something that also appends to the buffer."""
    loop = next((o for o in source.around(call) if isinstance(o, (cst.For, cst.While))), None)
    if not isinstance(loop, cst.For):
        return False
    is_range = isinstance(loop.iter, cst.Call) and source.names.builtin(loop.iter.func) == "range"
    filled = {
        dotted(inner.value)
        for inner in walk(loop.body)
        if isinstance(inner, cst.Attribute) and inner.attr.value == "append"
    }
    lengths = [
        dotted(inner.args[0].value)
        for inner in walk(call)
        if isinstance(inner, cst.Call) and source.names.builtin(inner.func) == "len" and inner.args
    ]
    return not is_range and bool(lengths) and all(one and one in filled for one in lengths)


def _is_only_read(source: Source, name: cst.Name) -> bool:
    """Whether a name that says `shard` is a file, or a list of them, that is stored, looped over, or opened.

    What picks one counts or compares, or is called with it: `my_part(shards)`, `i % shards`. A seed is stored alone.
    """
    if not _FILES.fullmatch(name.value):
        return False
    node: Node = name
    outer = source.parents[node]
    if isinstance(outer, cst.Attribute) and outer.attr is name:
        if dotted(outer.value) != "self":
            return False
        node, outer = outer, source.parents[outer]
    if isinstance(outer, cst.Arg):
        call = source.parents[outer]
        return isinstance(call, cst.Call) and _reads(source, call)
    if isinstance(outer, cst.Attribute):
        return outer.attr.value in _READ_METHODS
    if isinstance(outer, cst.Element):  # `self.shards, self.seed = shards, seed`
        node = source.parents[outer]
        outer = source.parents[node]
    if isinstance(outer, cst.Assign):
        return outer.value is node
    return isinstance(outer, (cst.For, cst.AssignTarget, cst.Param))


def _reads(source: Source, call: cst.Call) -> bool:
    """Whether a call opens a file, lists or shuffles all, or runs a method of the class, whose words are seen."""
    if source.names.builtin(call.func) in _READS or source.origin(call.func) in _OPENS:
        return True
    if isinstance(call.func, cst.Attribute) and call.func.attr.value == "shuffle":
        return True
    method = called_method(source, call)
    home = source.values.enclosing_class(call)
    return method is not None and home is source.values.enclosing_class(method)


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
