"""Policies and rules for modules: one error for all that cannot be, and rules that hold wherever a module runs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast.errors import PolicyError
from precast.policy.policy import Policy, module_context
from tests.attack.scenarios import Limit, scenario
from tests.attack.tools import net

T = Policy.load("torch")


def _says(error: Exception, *words: str) -> None:
    assert [word for word in words if word not in str(error)] == [], error
    assert len(str(error)) < 5000


def _refused(call: Callable[[], object], *words: str) -> None:
    try:
        call()
    except PolicyError as error:
        _says(error, *words)
        return
    raise AssertionError("no error")


def _file(text: str, name: str = "attacked.toml") -> Path:
    path = Path(tempfile.mkdtemp()) / name
    path.write_text(text, encoding="utf-8")
    return path


FILES = {
    "arrays 30,000 deep": "x = " + "[" * 30_000 + "]" * 30_000,
    "tables 30,000 deep": "ops.linear = " + "{a = " * 30_000 + "1" + "}" * 30_000,
    "itself as its base": 'base = "attacked.toml"',
    "a base whose name is too long": f'base = "{"b" * 9000}"',
    "a number of 6,000 digits": "mixed = " + "9" * 6000,
    "a zero byte in its base": 'base = "a\\u0000b"',
    "a rule for a rule": "[ops]\nlinear = {rule = {rule = 'keep'}}",
    "a date for a rule": "[ops]\nlinear = 2026-01-01",
    "a pattern of 9,000 stars": f"[modules]\n'{'a**' * 9000}' = 'fp32'",
    "a name that is a table": "[name]\nx = 1",
}
for _what, _text in FILES.items():
    scenario(
        "policies",
        f"a file with {_what} is one PolicyError that names the file",
        "by hand",
        name=f"a file with {_what}",
    )(lambda text=_text: _refused(lambda: Policy.load(_file(text)), "attacked.toml"))

JUNK: list[Any] = [
    None, 3, -1.5, 1j, b"torch", [], [[]], {}, {3: 4}, {"linear": []}, object(), torch.ones(2), "\ud800",
    "x" * 9000, "a\0b", {"cpu": 3}, {"a..b": "fp32"}, {"linear": {"rule": []}}, {"head": {"ops": 3}}, int, set(),
]  # fmt: skip
TAKES: dict[str, Callable[[Any], object]] = {
    "load": lambda x: Policy.load(x) if x != "" else None,
    "replace(ops=...)": lambda x: T.replace(ops=x),
    "replace(ops={...: })": lambda x: T.replace(ops={"linear": x}),
    "replace(modules=...)": lambda x: T.replace(modules=x),
    "replace(mixed=...)": lambda x: T.replace(mixed=x),
    "replace(name=...)": lambda x: T.replace(name=x),
    "resolve": lambda x: T.resolve(x, "cpu"),
    "resolve on a device": lambda x: T.resolve("linear", x),
    "resolve in a module": lambda x: T.resolve("linear", "cpu", module=x),
    "retarget": T.retarget,
    "the constructor": lambda x: Policy("p", x, x, x, x),
    "autocast(policy=...)": lambda x: precast.autocast("cpu", policy=x),
}


def _takes_junk(take: Callable[[Any], object]) -> None:
    for value in random.sample(JUNK, len(JUNK)):
        try:
            take(value)
        except PolicyError as error:
            _says(error)


for _what, _take in TAKES.items():
    scenario(
        "policies",
        f"{_what} takes junk of every type, or raises a PolicyError",
        "by hand",
        name=f"junk in {_what}",
    )(lambda take=_take: _takes_junk(take))


@scenario(
    "policies",
    "files, each the base of the one before, are read up to 32, and then refused",
    "by hand",
)
def a_chain_of_bases() -> None:
    folder = Path(tempfile.mkdtemp())
    for number in range(1500):
        (folder / f"{number}.toml").write_text(f'base = "{number + 1}.toml"\n')
    (folder / "1500.toml").write_text('[ops]\nmm = "fp32"\n')
    assert Policy.load(folder / "1475.toml").resolve("mm", "cpu").rule == "fp32"
    with pytest.raises(PolicyError, match="base"):
        Policy.load(folder / "0.toml")


@scenario("policies", "patterns that would take exponential time are matched at once", "by hand")
def patterns_of_stars() -> None:
    for pattern, name in (
        (".".join(["**"] * 40 + ["b"]), ".".join("a" * 40)),
        ("*a" * 40 + "b", "a" * 60),
        (".".join(["**", "*a*"] * 20 + ["b"]), ".".join(["aaa"] * 40)),
    ):
        policy = T.replace(modules={pattern: "fp32"})
        assert module_context(policy, name).enabled
        assert not module_context(policy, f"{name}b" if "." not in pattern else f"{name}.b").enabled


@scenario(
    "policies", "patterns that are drawn match what components matched one by one match", "by hand"
)
def drawn_patterns() -> None:
    def matches(pattern: list[str], name: list[str]) -> bool:
        if not pattern:
            return not name
        if pattern[0] == "**":
            return any(matches(pattern[1:], name[n:]) for n in range(len(name) + 1))
        return bool(name) and letters(pattern[0], name[0]) and matches(pattern[1:], name[1:])

    def letters(pattern: str, text: str) -> bool:
        if not pattern:
            return not text
        if pattern[0] == "*":
            return any(letters(pattern[1:], text[n:]) for n in range(len(text) + 1))
        return text[:1] == pattern[0] and letters(pattern[1:], text[1:])

    for _ in range(300):
        pattern = random.choices(["**", "*", "a", "a*", "*b*", "ab"], k=random.randint(1, 4))
        name = random.choices(["a", "b", "ab", "ba", "abb"], k=random.randint(1, 5))
        rule = ["**", *pattern[1:]] if pattern[0] == "*" and len(pattern) > 1 else pattern
        inside = module_context(T.replace(modules={".".join(pattern): "fp32"}), ".".join(name))
        expected = any(matches(rule, name[:n]) for n in range(len(name) + 1))
        assert inside.enabled is not expected, (pattern, name)


@scenario("policies", "random policies survive save and load", "by hand")
def drawn_policies_in_files() -> None:
    for _ in range(10):
        policy = T.replace(
            name=random.choice(["a", 'q"uote', "line\nbreak", "é"]),
            ops={
                op: random.choice(["lower", "fp32", "keep"])
                for op in random.sample(["mm", "exp", "linear", "cat"], 2)
            },
            modules={random.choice(["head", "a.*", "**"]): random.choice(["fp32", "lower"])},
        )
        assert Policy.load(_file(policy.text)) == policy


@scenario("policies", "policies that nobody uses keep no frame", "by hand")
def dropped_policies() -> None:
    reference = []
    for number in range(20):
        policy = T.replace(name=f"p{number}", ops={"matmul": "fp32"})
        with precast.autocast("cpu", policy=policy):
            assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype is torch.float32
        reference.append(weakref.ref(policy))
    del policy
    gc.collect()
    assert [ref() for ref in reference] == [None] * 20


@scenario(
    "policies", "a rule for an operation that is defined later holds in the next region", "by hand"
)
def operations_defined_later() -> None:
    import warnings

    warnings.simplefilter("ignore")
    policy = T.replace(ops={f"attack_late::op{n}": "fp32" for n in range(300)})
    with precast.autocast("cpu", policy=policy):
        pass
    for number in random.sample(range(300), 5):

        @torch.library.custom_op(f"attack_late::op{number}", mutates_args=())
        def op(x: Tensor) -> Tensor:
            return x.clone()

        with precast.autocast("cpu", policy=policy):
            result = getattr(torch.ops.attack_late, f"op{number}")(torch.ones(1).bfloat16())
        assert result.dtype is torch.float32


@scenario("policies", "what resolve says of an operation is what the operation does", "by hand")
def resolve_tells_the_truth() -> None:
    a = torch.ones(2, 2)
    for rule, expected in (
        ("fp32", torch.float32),
        ("lower", torch.bfloat16),
        ("keep", torch.float32),
    ):
        policy = T.replace(ops={"matmul": rule})
        assert policy.resolve("matmul", "cpu").rule == rule
        with precast.autocast("cpu", policy=policy):
            assert (a @ a).dtype is expected


# --- rules for modules ---


class Generates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Iterator[torch.dtype]:
        for _ in range(3):
            yield self.inner(x).dtype


class Waits(Generates):
    async def forward(self, x: Tensor) -> torch.dtype:  # type: ignore[override]
        await asyncio.sleep(0)
        return self.inner(x).dtype  # type: ignore[no-any-return]


def _ruled(model: nn.Module, **rules: object) -> Any:
    return precast.attach(
        model, T.replace(modules={k.replace("_", "."): v for k, v in rules.items()})
    )


@scenario(
    "modules", "a module whose forward is a generator follows its rule in every step", "by hand"
)
def generators_follow_rules() -> None:
    model = nn.ModuleDict({"g": Generates()})
    _ruled(model, g="fp32")
    with precast.autocast("cpu"):
        for dtype in model["g"](torch.ones(1, 2)):
            assert dtype is torch.float32
            assert torch.is_autocast_enabled("cpu")


@scenario(
    "modules",
    "modules whose forwards are coroutines follow their rules, whoever's turn it is",
    "by hand",
)
def coroutines_follow_rules() -> None:
    model = nn.ModuleDict({"a": Waits(), "b": Waits()})
    _ruled(model, a="fp32", b="float16")

    async def both() -> list[torch.dtype]:
        return await asyncio.gather(*(model[n](torch.ones(1, 2)) for n in "abab"))

    with precast.autocast("cpu"):
        result = asyncio.run(both())
    assert result == [torch.float32, torch.float16] * 2


@scenario(
    "modules",
    "rules of modules are the regions that a person would write, in any nesting",
    "plain PyTorch",
)
def rules_as_regions_by_hand() -> None:
    for rule in ("fp32", "float16", "bfloat16", "lower", "keep"):
        model = net(5)
        x = torch.randn(2, 2, 8)
        with torch.autocast("cpu"):
            before = model.norm(model.conv(x))
            y = (torch.relu_(model.mix(before)) + model.tied(before)).flatten(1)
            dtype = {"float16": torch.float16}.get(rule, torch.bfloat16)
            if rule == "fp32":
                y = y.float()
            elif rule in ("float16", "bfloat16", "lower"):
                y = y.to(dtype)
            with torch.autocast("cpu", dtype=dtype, enabled=rule != "fp32"):
                expected = model.head(y)
        _ruled(model, head=rule)
        with precast.autocast("cpu"):
            result = model(x)
        assert result.dtype is expected.dtype, rule
        assert torch.equal(result, expected), rule


@scenario("modules", "an exception inside a module restores what was there around it", "by hand")
def exceptions_inside_modules() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError

    model = nn.ModuleDict({"fails": Fails()})
    _ruled(model, fails=random.choice(["fp32", "float16"]))
    with precast.autocast("cpu"):
        for _ in range(5):
            with contextlib.suppress(KeyError):
                model["fails"](torch.ones(1))
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16


@scenario(
    "modules", "10,000 rules for a model of 300 modules mean what one by one they mean", "by hand"
)
def ten_thousand_rules() -> None:
    from precast.policy.module_plan import plan

    model = nn.Sequential(*(nn.ModuleDict({"x": nn.Linear(1, 1)}) for _ in range(150)))
    rules = {
        f"{n}.{part}": "fp32" for n, part in itertools.product(range(0, 10_000, 2), ("x", "*"))
    }
    planned = plan(model, T.replace(modules=rules))
    assert {m.name for m in planned.modules if not m.inside.enabled} == {
        f"{n}.x" for n in range(0, 150, 2)
    }


@scenario(
    "modules",
    "a scripted, a compiled and a wrapped module follow the rule of their name",
    "by hand",
)
def rules_through_wrappers() -> None:
    for wrap in (lambda m: torch.compile(m, backend="eager"), lambda m: m, torch.jit.script):
        model = nn.ModuleDict({"head": wrap(nn.Linear(2, 2))})
        _ruled(model, head="float16")
        with precast.autocast("cpu"):
            assert model["head"](torch.ones(1, 2)).dtype is torch.float16


@scenario(
    "modules",
    "a module whose forward is an asynchronous generator follows its rule",
    "by hand",
    limit=Limit(
        "An asynchronous generator may be resumed by any task between two of its own awaits. A rule for one is refused "
        "when the model is attached; write rules for the modules that it calls.",
        "PolicyError.*asynchronous generator",
    ),
)
def asynchronous_generators() -> None:
    class Streams(Generates):
        async def forward(self, x: Tensor) -> Any:
            yield self.inner(x)

    _ruled(nn.ModuleDict({"streams": Streams()}), streams="fp32")


@scenario(
    "policies",
    "an operation of a library that only ctypes knows of is found in the next region, however many rules wait",
    "by hand",
    limit=Limit(
        "The dispatcher tells nobody of new operations, and asking for each takes longer than a region. What Python, "
        "`torch.ops.load_library` or an import defines is seen at once; the rest some regions later, as each looks for "
        "16 names.",
        "not yet",
    ),
)
def operations_that_leave_no_sign() -> None:
    import warnings

    from precast import _torch

    warnings.simplefilter("ignore")
    policy = T.replace(ops={f"attack_unseen::op{n}": "fp32" for n in range(100)})
    with precast.autocast("cpu", policy=policy):
        pass
    sign = _torch.definition_counts()
    _torch.definition_counts = lambda: sign

    @torch.library.custom_op("attack_unseen::op99", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.clone()

    with precast.autocast("cpu", policy=policy):
        result = op(torch.ones(1).bfloat16())
    assert result.dtype is torch.float32, "not yet"
