"""Operations on tensors for the rules about numerics: one class for `torch.exp(x)` and `x.exp()`.

Invariants: a method's receiver is never a module, `self`, or an imported name; a name is float16, or a product of
matrices, only if all its values are.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass

from precast_lint.meaning.assignments import default_of_field, the_value, values_seen
from precast_lint.meaning.regions import regions_around
from precast_lint.parsing.arguments import Arguments
from precast_lint.parsing.scopes import Binding
from precast_lint.parsing.source import Source
from precast_lint.parsing.syntax import Node, cst, is_self, string_value, walk

__all__ = [
    "LAYERS",
    "TensorOperation",
    "constant",
    "is_half",
    "is_layer",
    "is_lowered",
    "modules_in",
    "number_in",
    "operation",
    "value_of",
]

_MODULES = ("torch", "torch.nn.functional", "torch.special", "torch.linalg")
_HALF = ("torch.float16", "torch.half")
_PRODUCTS = ("matmul", "bmm", "mm", "einsum", "baddbmm", "addmm", "linear", "conv1d", "conv2d")
LAYERS = re.compile(r"torch\.nn\.(modules\.\w+\.)?(Linear|Bilinear|Conv(Transpose)?[123]d)$")
_ACTIVATIONS = re.compile(
    r"torch\.nn\.(modules\.\w+\.)?(ReLU6?|LeakyReLU|GELU|SiLU|Tanh|Dropout[123]?d?|Identity|Flatten)$"
)
_SEQUENTIALS = ("torch.nn.Sequential", "torch.nn.modules.container.Sequential")
_UNARY = ("exp", "log", "sigmoid")
_SAME_DTYPE = (
    "abs",
    "clone",
    "contiguous",
    "detach",
    "dropout",
    "expand",
    "flatten",
    "gelu",
    "leaky_relu",
    "masked_fill",
    "permute",
    "relu",
    "reshape",
    "silu",
    "squeeze",
    "transpose",
    "unsqueeze",
    "view",
    *("expand_as", "flip", "gather", "index_select", "movedim", "narrow", "repeat", "roll"),
    *("repeat_interleave", "swapaxes", "tril", "triu", "unflatten", "view_as"),
)
_RESHAPES = ("einops.rearrange", "einops.repeat", "einops.einops.rearrange")
_ARITHMETIC = {
    **dict.fromkeys(("add", "sub", "add_", "sub_", "subtract"), False),
    **dict.fromkeys(("mul", "div", "mul_", "div_", "multiply", "divide", "true_divide"), True),
}  # True if the other operand may be something else than a product or a number
_IN_PLACE = (cst.AddAssign, cst.SubtractAssign, cst.MultiplyAssign, cst.DivideAssign)


_SUMS = (
    *(
        "cosh",
        "exp",
        "expm1",
        "log",
        "log10",
        "log1p",
        "log2",
        "log_softmax",
        "mean",
        "norm",
        "pow",
    ),
    *("prod", "rsqrt", "sigmoid", "softmax", "sqrt", "square", "std", "sum", "tanh", "var"),
)
_LOWERED_TOO = ("amax", "amin", "clamp", "clamp_min", "mean", "sigmoid", "t", "tanh")
_UPDATES = 6  # one after another
_CALLS = 6  # of a function
_FLOAT32 = {"eps": 2.0**-23, "tiny": 2.0**-126, "max": 2.0**128 - 2.0**104}
_FLOAT64 = {"eps": 2.0**-52, "tiny": 2.0**-1022, "max": sys.float_info.max}
_LIMITS_OF = {"float32": _FLOAT32, "float": _FLOAT32, "float64": _FLOAT64, "double": _FLOAT64}
_LIMITS = ("amax", "amin", "clamp", "clamp_max", "clamp_min", "max", "min", "neg", "relu_")
_TABLED = ("max", "min")  # with a dim they give the values and the places


@dataclass(frozen=True)
class TensorOperation:
    """A call of an operation on its first tensor, `torch.softmax(x, 1)`, or as a method, `x.softmax(1)`."""

    name: str
    operand: Node
    positional: tuple[Node, ...]
    keywords: dict[str, Node]
    call: cst.Call
    is_method: bool

    def get(self, name: str, position: int) -> Node | None:
        """Return an argument; its position is counted after the operand."""
        if name in self.keywords:
            return self.keywords[name]
        return self.positional[position] if position < len(self.positional) else None


def operation(source: Source, node: Node | None, *names: str) -> TensorOperation | None:
    """Return the operation of a call, if it has one of some names."""
    if not isinstance(node, cst.Call):
        return None
    arguments = Arguments.of(node)
    if arguments.starred:
        return None
    path = source.origin(node.func)
    if path is not None:
        module, _, name = path.rpartition(".")
        if module not in _MODULES or name not in names:
            return None
        keywords = dict(arguments.keywords)
        operand = arguments.positional[0] if arguments.positional else keywords.pop("input", None)
        rest = arguments.positional[1:]
        if operand is None:
            return None
        return TensorOperation(name, operand, rest, keywords, node, is_method=False)
    func = node.func
    if not isinstance(func, cst.Attribute) or func.attr.value not in names:
        return None
    owner = func.value
    if source.origin(owner) is not None or is_self(owner):
        return None
    if func.attr.value in _UNARY and arguments.positional:
        return None  # `xp.exp(x)`: of a module that nobody knows
    return TensorOperation(
        func.attr.value, func.value, arguments.positional, arguments.keywords, node, is_method=True
    )


def value_of(source: Source, node: Node) -> Node:
    """Return an expression, or the only value of its name, if nothing changes that value in place."""
    binding = source.names.only_binding(node)
    if binding is None or binding.kind != "assign" or binding.value is None:
        return node
    assert isinstance(node, cst.Name)
    scope = source.scopes.scope_of[node].home(node.value)
    for other in source.scopes.references(scope, node.value) if scope is not None else ():
        parent = source.parents.get(other)
        if isinstance(parent, cst.Attribute) and parent.attr.value.endswith("_"):
            return node
        if isinstance(parent, cst.Subscript) and isinstance(
            source.parents.get(parent), (cst.AssignTarget, cst.AugAssign)
        ):
            return node
    return binding.value


def constant(source: Source, node: Node | None, depth: int = 8) -> float | None:
    """Return the value of a number, or of a name or attribute that is bound to a number."""
    if depth == 0:
        return None
    if isinstance(node, (cst.Integer, cst.Float)):
        return float(node.evaluated_value)
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, (cst.Minus, cst.Plus)):
        inner = constant(source, node.expression, depth - 1)
        sign = -1 if isinstance(node.operator, cst.Minus) else 1
        return None if inner is None else sign * inner
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Power):
        base, exponent = (
            constant(source, node.left, depth - 1),
            constant(source, node.right, depth - 1),
        )
        if base is None or exponent is None or not (base > 0 and abs(exponent) < 300):
            return None
        return float(base**exponent)
    if isinstance(node, cst.Call) and source.names.builtin(node.func) == "float":
        only = node.args[0].value if len(node.args) == 1 else None
        text = string_value(only) if only is not None else None
        return _parsed(text) if text is not None else constant(source, only, depth - 1)
    if isinstance(node, cst.Name):
        binding = source.names.only_binding(node)
        if binding is not None and binding.kind == "assign" and binding.value is not node:
            return (
                None
                if isinstance(binding.value, cst.Name)
                else constant(source, binding.value, depth - 1)
            )
        return _default(source, binding, depth) if binding is not None else None
    if isinstance(node, (cst.Attribute, cst.Subscript)):
        value = the_value(source, node)
        if value is node and isinstance(node, cst.Attribute):
            value = default_of_field(source, node) or node
        if value is not node:
            return constant(source, value, depth - 1)
        return _limit(source, node) if isinstance(node, cst.Attribute) else None
    return None


def number_in(source: Source, node: Node | None) -> Node | None:
    """Return the number in `torch.tensor(1e-9)`, which gets the dtype of the other operand."""
    if not isinstance(node, cst.Call) or source.origin(node.func) != "torch.tensor":
        return None
    value = Arguments.of(node)
    is_plain = len(value.positional) == 1 and "dtype" not in value.keywords and not value.starred
    return value.positional[0] if is_plain else None


def _limit(source: Source, node: cst.Attribute) -> float | None:
    """Return the value of `torch.finfo(torch.float32).eps` and other limits of float32 and float64."""
    call = node.value
    if not isinstance(call, cst.Call) or len(call.args) != 1:
        return None
    if source.origin(call.func) not in ("torch.finfo", "numpy.finfo"):
        return None
    dtype = (source.origin(call.args[0].value) or "").rpartition(".")[2]
    limits = _LIMITS_OF.get(dtype, {})
    name = {"smallest_normal": "tiny"}.get(node.attr.value, node.attr.value)
    return -limits["max"] if name == "min" and limits else limits.get(name)


def _default(source: Source, binding: Binding, depth: int) -> float | None:
    """Return the number that all calls of this file pass to a parameter, or else its default value."""
    if binding.kind != "param":
        return None
    values = source.values.call_arguments.for_parameter(binding) or [binding.value]
    numbers = {constant(source, value, depth - 1) for value in values}
    return numbers.pop() if len(numbers) == 1 else None


def _parsed(text: str) -> float | None:
    """Return the number in `float("-1e20")`; None for infinity and NaN."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _kept(source: Source, name: cst.Name) -> list[Binding]:
    """Return the bindings that may reach a read, without updates such as `x *= y`, which keep a tensor's dtype."""
    results = values_seen(source, name)
    for _ in range(_UPDATES):
        others = [b for b in results if not _is_update(source, b)]
        if others or not results:
            return others
        first = results[-1].node
        assert isinstance(first, cst.Name)
        results = values_seen(source, first)
    return []


def _is_update(source: Source, binding: Binding) -> bool:
    outer = source.parents.get(binding.node)
    is_target = isinstance(outer, cst.AugAssign) and outer.target is binding.node
    return is_target and isinstance(outer.operator, _IN_PLACE)  # type: ignore[union-attr]


def _passed_arguments(source: Source, results: list[Binding]) -> list[Node] | None:
    """Return the arguments of all calls of this file for a parameter that is not bound again; None if unknown."""
    values = source.values.call_arguments.for_parameter(results[0]) if len(results) == 1 else []
    entries = [value for value in values if value is not None]
    return entries if entries and len(entries) == len(values) <= _CALLS else None


def is_half(source: Source, node: Node, depth: int = 10) -> bool:
    """Return True if a tensor is float16 for certain."""
    if depth <= 0:
        return False
    if isinstance(node, cst.Call):
        return _makes_half(source, node, depth)
    if isinstance(node, cst.BinaryOperation):
        if isinstance(node.operator, cst.MatrixMultiply):
            return _in_float16(source, node)
        sides = (node.left, node.right)
        halves = [is_half(source, side, depth - 1) for side in sides]
        numbers = [constant(source, side) is not None for side in sides]
        return any(halves) and all(h or n for h, n in zip(halves, numbers, strict=True))
    if isinstance(node, cst.Name):
        results = _kept(source, node)
        values = _passed_arguments(source, results)
        if values is not None:
            return all(
                not any(regions_around(source, value)) and is_half(source, value, depth - 3)
                for value in values
            )
        return bool(results) and all(
            b.kind == "assign" and b.value is not None and is_half(source, b.value, depth - 1)
            for b in results
        )
    if isinstance(node, cst.Subscript) or (
        isinstance(node, cst.Attribute) and node.attr.value in ("T", "mT", "data")
    ):
        return is_half(source, node.value, depth - 1)
    if isinstance(node, cst.Attribute):
        stored = source.values.sources(node) if isinstance(node.value, cst.Name) else []
        return bool(stored) and all(
            note is None and value is not None and is_half(source, value, depth - 3)
            for value, note in stored
        )
    return isinstance(node, cst.UnaryOperation) and is_half(source, node.expression, depth - 1)


def _makes_half(source: Source, call: cst.Call, depth: int) -> bool:
    arguments = Arguments.of(call)
    path = source.origin(call.func) or ""
    if path.startswith("torch."):
        if "dtype" in arguments.keywords:
            is_half_given = source.origin(arguments.keywords["dtype"]) in _HALF
            return is_half_given and path.count(".") == 1
        if path.rpartition(".")[2] in _PRODUCTS:
            return _in_float16(source, call)
        return _keeps_half(source, call, depth)
    if LAYERS.match(source.instance(call.func) or ""):
        return _in_float16(source, call)
    if not isinstance(call.func, cst.Attribute) or path:
        return False
    name, owner = call.func.attr.value, call.func.value
    if name == "half":
        return not call.args and _is_tensor(source, owner)
    alike = _made_like(source, call)
    if alike is not None:
        return is_half(source, alike, depth - 1) and _is_tensor(source, owner)
    if name in ("to", "type"):
        values = [*arguments.positional, *arguments.keywords.values()]
        return any(source.origin(v) in _HALF for v in values) and _is_tensor(source, owner)
    if name in ("matmul", "mm", "bmm"):
        return _in_float16(source, call)
    return "dtype" not in arguments.keywords and _keeps_half(source, call, depth)


def _keeps_half(source: Source, call: cst.Call, depth: int) -> bool:
    result = operation(source, call, *_SAME_DTYPE, *_SUMS, *_LIMITS)
    if result is None:
        return False
    if result.name in _SUMS and any(regions_around(source, call)):
        return False  # float32 in a region
    if result.name in _TABLED and (result.positional or result.keywords):
        return False
    return is_half(source, result.operand, depth - 1)


def _is_tensor(source: Source, node: Node) -> bool:
    """Return False for a module: `model.half()` is not a tensor."""
    return not (source.instance(node) or "").startswith("torch.nn.")


def _in_float16(source: Source, node: Node) -> bool:
    region = next(regions_around(source, node), None)
    return region is not None and region.dtype == "torch.float16" and region.enabled is True


def is_lowered(source: Source, node: Node, depth: int = 12) -> bool:
    """Return True if an expression is a product of matrices, or arithmetic on one: float16 in a float16 region."""
    if depth <= 0:
        return False
    if isinstance(node, cst.BinaryOperation):
        return _is_lowered_arithmetic(source, node, depth)
    if isinstance(node, cst.Name):
        results = _kept(source, node)
        arguments = _passed_arguments(source, results)
        if arguments is not None:
            return all(is_lowered(source, value, depth - 3) for value in arguments)
        values = [b.value for b in results if b.kind == "assign" and b.value is not None]
        if len(values) != len(results):
            return False
        if len(values) > 1 and any(_casts(value) for value in values):
            return False
        return any(is_lowered(source, value, depth - 1) for value in values)
    if isinstance(node, cst.Subscript) or (
        isinstance(node, cst.Attribute) and node.attr.value in ("T", "mT")
    ):
        return is_lowered(source, node.value, depth - 1)
    if isinstance(node, cst.UnaryOperation):
        return is_lowered(source, node.expression, depth - 1)
    return isinstance(node, cst.Call) and _is_lowered_call(source, node, depth)


def _is_lowered_call(source: Source, node: cst.Call, depth: int) -> bool:
    alike = _made_like(source, node)
    if alike is not None:
        return is_lowered(source, alike, depth - 1)
    if source.origin(node.func) == "torch.where" and len(node.args) == 3:
        return _are_lowered(source, [arg.value for arg in node.args[1:]], depth)
    if _casts(node):
        return False
    instance = source.instance(node.func) or ""
    origin = source.origin(node.func)
    if operation(source, node, *_PRODUCTS) is not None or LAYERS.match(instance):
        return True
    if origin == "einops.einsum":
        return True
    if origin in _RESHAPES:
        return bool(node.args) and is_lowered(source, node.args[0].value, depth - 1)
    sum_ = operation(source, node, *_ARITHMETIC)
    if sum_ is not None:
        return _is_lowered_method(source, sum_, depth)
    if instance in _SEQUENTIALS:
        return _ends_with_layer(source, node.func)
    if _ACTIVATIONS.match(instance):
        return bool(node.args) and is_lowered(source, node.args[0].value, depth - 1)
    same = operation(source, node, *_SAME_DTYPE, *_LOWERED_TOO)
    return same is not None and is_lowered(source, same.operand, depth - 1)


def is_layer(source: Source, module: Node) -> bool:
    """Return True if a module multiplies its input by weights."""
    return LAYERS.match(source.instance(module) or "") is not None


def _ends_with_layer(source: Source, module: Node) -> bool:
    """Return True if `nn.Sequential(...)` ends with a layer, or with operations after one that keep its dtype."""
    for inner in reversed(modules_in(source, module)):
        instance = source.instance(inner) or ""
        if not _ACTIVATIONS.match(instance):
            return bool(LAYERS.match(instance))
    return False


def modules_in(source: Source, module: Node) -> list[Node]:
    """Return the modules of `nn.Sequential(...)`; empty if one is unknown."""
    definition = source.values.constructor(module)
    if not isinstance(definition, cst.Call) or source.origin(definition.func) not in _SEQUENTIALS:
        return []
    table = (
        definition.args[0].value
        if len(definition.args) == 1 and not definition.args[0].star
        else None
    )
    if isinstance(table, cst.Call) and source.origin(table.func) == "collections.OrderedDict":
        return _named_modules(table)
    plain = all(not arg.star and arg.keyword is None for arg in definition.args)
    return [arg.value for arg in definition.args] if plain else []


def _named_modules(table: cst.Call) -> list[Node]:
    """Return the modules of `OrderedDict([("fc", nn.Linear(8, 8)), ...])`, also of a dictionary."""
    value = table.args[0].value if len(table.args) == 1 else None
    if isinstance(value, cst.Dict):
        entries: list[Node] = [e.value for e in value.elements if isinstance(e, cst.DictElement)]
        return entries if len(entries) == len(value.elements) else []
    pairs = [e.value for e in value.elements] if isinstance(value, (cst.List, cst.Tuple)) else []
    entries = [
        p.elements[1].value for p in pairs if isinstance(p, cst.Tuple) and len(p.elements) == 2
    ]
    return entries if len(entries) == len(pairs) else []


def _is_lowered_arithmetic(source: Source, node: cst.BinaryOperation, depth: int) -> bool:
    """Return True for a product of matrices, and for its sum or product with a number or another one."""
    if isinstance(node.operator, cst.MatrixMultiply):
        return not _casts(node)
    if isinstance(node.operator, (cst.Add, cst.Subtract)):
        return _are_lowered(source, [node.left, node.right], depth)
    if not isinstance(node.operator, (cst.Multiply, cst.Divide)):
        return False
    if constant(source, node.left) is not None:
        # `1 / x` is a reciprocal, which is float32
        is_product = isinstance(node.operator, cst.Multiply)
        return is_product and is_lowered(source, node.right, depth - 1)
    other = not isinstance(node.right, cst.Call) or _is_number(source, node.right)
    return other and is_lowered(source, node.left, depth - 1)


def _is_lowered_method(source: Source, result: TensorOperation, depth: int) -> bool:
    """Return True for `scores.div(8)`, `torch.mul(scores, scale)` and others, as for the operators."""
    other = result.get("other", 0)
    if other is None or "alpha" in result.keywords or "rounding_mode" in result.keywords:
        return False
    if not _ARITHMETIC[result.name] and not result.name.endswith("_"):
        return _are_lowered(source, [result.operand, other], depth)
    is_other = not isinstance(other, cst.Call) or _is_number(source, other)
    is_other = is_other or result.name.endswith("_")
    return is_other and is_lowered(source, result.operand, depth - 1)


def _are_lowered(source: Source, sides: list[Node], depth: int) -> bool:
    """Return True if all are products of matrices or numbers, and at least one is not a number."""
    lowered = [is_lowered(source, side, depth - 1) for side in sides]
    numbers = [constant(source, side) is not None for side in sides]
    return any(lowered) and all(a or b for a, b in zip(lowered, numbers, strict=True))


def _made_like(source: Source, call: cst.Call) -> Node | None:
    """The tensor whose dtype a call gives: `mask.to(x.dtype)`, `mask.type_as(x)`, `torch.ones_like(x)`."""
    arguments = Arguments.of(call)
    values = [*arguments.positional, *arguments.keywords.values()]
    if source.origin(call.func) in ("torch.ones_like", "torch.zeros_like"):
        return values[0] if len(values) == 1 else None
    func = call.func
    if not isinstance(func, cst.Attribute) or len(values) != 1:
        return None
    if func.attr.value == "type_as":
        return values[0]
    is_dtype = isinstance(values[0], cst.Attribute) and values[0].attr.value == "dtype"
    return values[0].value if func.attr.value in ("to", "type") and is_dtype else None  # type: ignore[attr-defined]


def _is_number(source: Source, call: cst.Call) -> bool:
    """`math.sqrt(d)`, `x.size(-1)`: a number of Python's, which changes no dtype."""
    origin = source.origin(call.func) or ""
    if origin.startswith("math.") or source.names.builtin(call.func) in ("int", "float", "len"):
        return True
    return isinstance(call.func, cst.Attribute) and call.func.attr.value in ("size", "item")


def _casts(node: Node) -> bool:
    return any(
        isinstance(inner, cst.Attribute)
        and inner.attr.value in ("float", "double", "to", "type", "type_as")
        for inner in walk(node)
    )
