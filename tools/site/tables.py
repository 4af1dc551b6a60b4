"""Tables made from the policy files: the rules of a policy, and where it differs from another.

Invariants: a row for other builds or versions of PyTorch is there, and says so; the tables do not depend on the
machine. What rules mean is said in the page's language, reasons as the policy files give them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from precast._torch import operator_overloads
from precast.policy.policy import DEVICE_TYPES, Entry, Policy, Rule
from tools.operations_page import for_all_versions, name_of, note, row
from tools.site.directives import PageError

__all__ = ["CHINESE", "difference", "rules"]

_HEADS: dict[str, dict[str, tuple[str, ...]]] = {
    "rules": {
        "en": ("rule", "what it means", "its operations on `{device}`"),
        "zh": ("规则", "含义", "`{device}` 上的算子"),
    },
    "difference": {
        "en": ("operations on `{device}`", "`{other}`", "`{name}`", "why"),
        "zh": ("`{device}` 上的算子", "`{other}`", "`{name}`", "原因"),
    },
}
CHINESE = {
    Rule.LOWER: "参数转换为区域的 dtype",
    Rule.LOWER_OUT_FP32: "乘积的因子转换为区域的 dtype，乘积为 float32",
    Rule.FP32: "参数转换为 float32",
    Rule.FP32_IF_REFUSED: "照常运行；PyTorch 不支持 16 位参数时以 float32 运行",
    Rule.FP32_SET_DTYPE: "通过算子自己的 dtype 参数，以 float32 计算",
    Rule.FP32_APPEND_DTYPE: "改用带 dtype 参数的重载，以 float32 计算",
    Rule.PROMOTE: "参数转换为其中最宽的 dtype",
    Rule.BANNED: "在区域内拒绝执行",
    Rule.KEEP: "与区域外相同",
    Rule.FALLTHROUGH: "算子照常运行，它调用的算子遵循各自的规则",
    Rule.FLOAT8: "矩阵用 8 位相乘，每个矩阵一个缩放系数",
    Rule.FLOAT8_POW2: "矩阵用 8 位相乘，每个矩阵一个缩放系数，取 2 的幂",
    Rule.FLOAT8_ROWWISE: "矩阵用 8 位相乘，每行一个缩放系数",
    Rule.FLOAT8_HP_GRAD: "矩阵用 8 位相乘，每行一个缩放系数，权重的梯度用 16 位计算",
}
"""The meaning of each rule."""
_WRITING = {"en": "and {} forms with `out=`, or in place", "zh": "以及 {} 个带 `out=` 或原地的形式"}
_FOLDED = 12  # fewer forms are not worth a click
_NO_RULE = {"en": "no rule", "zh": "无规则"}
_MIXED = {
    "en": "mixed dtypes, where PyTorch raises",
    "zh": "混合 dtype，PyTorch 会报错之处",
}
_MIXED_CELLS = {
    "en": {"raise": "an error", "promote": "`promote`"},
    "zh": {"raise": "报错", "promote": "`promote`"},
}
_MIXED_WHY = {
    "en": "code that runs outside a region runs inside, too",
    "zh": "区域外能运行的代码，区域内也能运行",
}


def rules(name: str, device: str, language: str = "en") -> str:
    """Each rule that a preset has on a device type, what it means, and its operations.

    Raises:
        PageError: there is no such preset or device type, or it has no rules there.
    """
    entries = _entries(_preset(name), device)
    if not entries:
        raise PageError(f"the policy {name!r} has no rules on {device}")
    rows = [
        (f"`{rule}`", _meaning(rule, language), _names(_keys(entries, rule), language))
        for rule in Rule
        if any(entry.rule == rule for entry in entries.values())
    ]
    return _table((cell.format(device=device) for cell in _HEADS["rules"][language]), rows)


def difference(name: str, other: str, device: str, language: str = "en") -> str:
    """The rows in which a preset differs from another: those alike in one line, with the reason.

    Raises:
        PageError: there is no such preset or device type, or there is no difference.
    """
    policy, base = _preset(name), _preset(other)
    ours, theirs = _entries(policy, device), _entries(base, device)
    alike: dict[tuple[str, str, str], list[str]] = {}
    for key in sorted({*ours, *theirs}):
        if ours.get(key) != theirs.get(key):
            before, after = (_cell(each.get(key), language) for each in (theirs, ours))
            why = _why(ours.get(key) or theirs[key], language)
            alike.setdefault((before, after, why), []).append(key)
    rows = [(_names(keys, language), *group) for group, keys in sorted(alike.items())]
    if policy.mixed != base.mixed:
        cells = _MIXED_CELLS[language]
        why = _MIXED_WHY[language]
        rows.insert(0, (_MIXED[language], cells[base.mixed], cells[policy.mixed], why))
    if not rows:
        raise PageError(f"the policies {name!r} and {other!r} are the same on {device}")
    head = (
        cell.format(device=device, other=other, name=name)
        for cell in _HEADS["difference"][language]
    )
    return _table(head, rows)


def _preset(name: str) -> Policy:
    if name not in Policy.presets():
        raise PageError(f"there is no preset {name!r}; there are {', '.join(Policy.presets())}")
    return for_all_versions(name)


def _entries(policy: Policy, device: str) -> Mapping[str, Entry]:
    if device not in DEVICE_TYPES:
        raise PageError(f"there is no device type {device!r}; there are {', '.join(DEVICE_TYPES)}")
    return policy.rules(device)


def _keys(entries: Mapping[str, Entry], rule: Rule) -> list[str]:
    return [key for key in sorted(entries) if entries[key].rule == rule]


def _names(keys: list[str], language: str) -> str:
    """Operations; where many only write into tensors that are there, these are folded away."""
    writing = [key for key in keys if _writes(key)]
    if len(writing) < _FOLDED:
        return ", ".join(map(name_of, keys))
    others = ", ".join(name_of(key) for key in keys if key not in writing)
    summary = _WRITING[language].format(len(writing))
    names = ", ".join(map(name_of, writing))
    return f"{others}<details><summary>{summary}</summary>{names}</details>"


def _writes(key: str) -> bool:
    """Return True if an operation changes one of its arguments; False if this PyTorch does not have it."""
    name, _, overload = key.partition(".")
    schema = operator_overloads(name).get("" if overload == "default" else overload)
    return schema is not None and schema.is_mutable


def _meaning(rule: Rule, language: str) -> str:
    return CHINESE[rule] if language == "zh" else rule.meaning


def _cell(entry: Entry | None, language: str) -> str:
    return f"`{entry.rule}`" if entry else _NO_RULE[language]


def _why(entry: Entry, language: str) -> str:
    """The reason, in the page's language where it is the rule's own meaning."""
    return note(entry).replace(entry.rule.meaning, _meaning(entry.rule, language))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = [*head]
    lines = [row(cells), "|---" * len(cells) + "|", *map(row, rows)]
    return "\n".join(lines)
