"""Every rule on its own cases: silent on the valid ones, right on the others, and its page is current."""

from __future__ import annotations

import textwrap

import pytest

from precast_lint.checking.engine import Checked, check, fix
from precast_lint.model import Applicability, Case, Rule
from precast_lint.parsing.text import decode
from precast_lint.selecting.look import interesting
from precast_lint.selecting.registry import all_rules
from precast_lint.selecting.settings import Settings
from tools.rule_pages import FOLDER, INDEX, index_file, pages

RULES = list(all_rules().values())


def _cases(valid: bool) -> list[object]:
    return [
        pytest.param(rule, case, id=f"{rule.code}-{number}")
        for rule in RULES
        for number, case in enumerate(rule.valid if valid else rule.invalid, 1)
    ]


def _text(code: str) -> str:
    return textwrap.dedent(code).removeprefix("\n")


def _settings(rule: Rule, case: Case, unsafe: bool) -> Settings:
    codes = frozenset({rule.code, *case.also})
    return Settings(codes=codes, min_torch=case.min_torch, unsafe_fixes=unsafe)


def _fixed(rule: Rule, case: Case, code: str, unsafe: bool) -> Checked:
    return fix(decode(_text(code).encode()), case.filename, _settings(rule, case, unsafe))


@pytest.mark.parametrize(("rule", "case"), _cases(valid=True))
def test_a_rule_is_silent_where_nothing_is_wrong(rule: Rule, case: Case) -> None:
    found = check(decode(_text(case.code).encode()), case.filename, _settings(rule, case, False))
    assert [f.message for f in found.findings] == []


@pytest.mark.parametrize(("rule", "case"), _cases(valid=False))
def test_a_rule_finds_what_is_wrong(rule: Rule, case: Case) -> None:
    text = decode(_text(case.code).encode())
    assert interesting(text.data, {rule.code}), "its words do not fit the case"
    found = check(text, case.filename, _settings(rule, case, False)).findings
    ours = [f for f in found if f.code == rule.code]
    assert ours
    assert case.count in (None, len(ours))
    assert not any("{" in f.message for f in ours)


@pytest.mark.parametrize(("rule", "case"), _cases(valid=False))
def test_a_rules_fix_is_exact_and_final(rule: Rule, case: Case) -> None:
    expected = case.code if case.fixed is None else case.fixed
    result = _fixed(rule, case, case.code, unsafe=True)
    assert result.text.string == _text(expected)
    again = _fixed(rule, case, expected, unsafe=True)
    assert again.text.string == _text(expected)
    safe = _fixed(rule, case, case.code, unsafe=False)
    if case.unsafe:
        assert safe.text.string == _text(case.code)
    else:
        assert safe.text.string == _text(expected)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_says_what_it_is(rule: Rule) -> None:
    assert rule.valid
    assert rule.invalid
    for text in (rule.what, rule.why, rule.fine):
        assert text.endswith((".", "`"))
    assert not rule.message.endswith(".")
    fixed = [case for case in rule.invalid if case.fixed is not None]
    assert bool(fixed) == (rule.fix is not Applicability.NONE)
    if rule.fix is Applicability.UNSAFE:
        assert all(case.unsafe for case in fixed)


def test_the_pages_are_what_the_tool_writes() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert committed == pages(), "run: python -m tools.rule_pages"


def test_the_index_is_what_the_tool_writes() -> None:
    assert INDEX.read_text(encoding="utf-8") == index_file(), "run: python -m tools.rule_pages"
