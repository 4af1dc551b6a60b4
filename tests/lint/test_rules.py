"""Each rule on its cases: its findings and fixes; and the pages and the index, which are written from the rules."""

from __future__ import annotations

import pytest

from precast_lint.checking.engine import Checked, check, fix
from precast_lint.model import LintRule
from precast_lint.parsing.text import decode
from precast_lint.selecting.look import interesting
from precast_lint.selecting.registry import all_rules
from precast_lint.selecting.settings import LintSettings
from tests.lint.cases import ALL, Case, versions
from tools.rule_pages import FOLDER, INDEX, index_file, pages

RULES = list(all_rules().values())


def _parameters(cases: list[Case]) -> list[object]:
    return [pytest.param(c, id=f"{c.rule.code}-{number}") for number, c in enumerate(cases, 1)]


def _checked(case: Case) -> Checked:
    settings = LintSettings(codes=case.codes, min_torch=case.min_torch)
    return check(decode(case.code.encode()), "example.py", settings)


def _fixed(case: Case, code: str, unsafe: bool) -> str:
    settings = LintSettings(codes=case.codes, min_torch=case.min_torch, unsafe_fixes=unsafe)
    return fix(decode(code.encode()), "example.py", settings).text.string


@pytest.mark.parametrize("case", _parameters([case for case in ALL if not case.count]))
def test_a_rule_is_silent_where_nothing_is_wrong(case: Case) -> None:
    assert [finding.message for finding in _checked(case).findings] == []


@pytest.mark.parametrize("case", _parameters([case for case in ALL if case.count]))
def test_a_rule_reports_each_mistake(case: Case) -> None:
    code = case.rule.code
    assert interesting(case.code.encode(), {code}), "the case has none of the rule's words"
    findings = [f for f in _checked(case).findings if f.code == code]
    messages = [finding.message for finding in findings]
    assert len(messages) == case.count
    if case.severity is not None:
        assert {finding.severity.value for finding in findings} == {case.severity}
    assert not any("{" in message for message in messages)


@pytest.mark.parametrize("case", _parameters([case for case in ALL if case.count]))
def test_a_fix_is_exact_and_final(case: Case) -> None:
    assert _fixed(case, case.code, unsafe=True) == case.fixed
    if case.fixed != case.code:
        assert _fixed(case, case.fixed, unsafe=True) == case.fixed
        assert _fixed(case, case.code, unsafe=False) == (case.code if case.unsafe else case.fixed)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_has_a_page_and_an_example(rule: LintRule) -> None:
    for text in (rule.what, rule.why, rule.fine):
        assert text.endswith((".", "`"))
    assert not rule.message.endswith(".")
    before, after = versions(rule.example)
    assert before != after


def test_the_pages_are_what_the_tool_writes() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert committed == pages(), "run: python -m tools.rule_pages"


def test_the_index_is_what_the_tool_writes() -> None:
    assert INDEX.read_text(encoding="utf-8") == index_file(), "run: python -m tools.rule_pages"
