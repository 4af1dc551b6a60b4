"""The README files and the pages in `docs/` are run: examples, links, commands, names.

Invariants:
    - Every ```python block runs, each page from top to bottom in one namespace, on the CPU. In it
      `f(x)  # -> text` says what the expression's `repr` is, and `f(x)  # raises Error: text` what
      it raises: the type, and a part of the message. Both are checked.
    - A block that cannot run on the CPU begins with `# not run: why`; `NOT_RUN` counts them.
    - Every ```toml block is a policy file that loads.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import markdown
import pytest
from markdown_it import MarkdownIt

from precast import Policy
from precast.cli.main import main
from precast.errors import MissingExtraError
from tests.support.pages import BLOCK, CHECKS, NOT_RUN, blocks, with_checks
from tools import operations_page
from tools.site.directives import asked

ROOT = Path(__file__).parents[2]
DOCS = sorted(p for p in ROOT.glob("docs/**/*.md") if p.parent.name not in {"rules", "api"})
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *DOCS]
IN_TWO_LANGUAGES = (
    "index",
    "start",
    "decides",
    "comparison",
    "ship",
    "tune",
    "compare",
    "try",
    "float8",
    "guide/*",
    "recipes/*",
)
OTHERS = ("CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
PROSE = [*PAGES, *sorted(ROOT.glob("docs/api/*.md")), *(ROOT / name for name in OTHERS)]
MODULES = sorted((ROOT / "src" / "precast").rglob("*.py"))


def _id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


# --- examples ---


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"} | vars(CHECKS)
    not_run = 0
    for line, text in blocks(page, "python"):
        if text.startswith("# not run: "):
            not_run += 1
            continue
        exec(compile("\n" * line + with_checks(text), str(page), "exec"), namespace)
    assert not_run == NOT_RUN.get(_id(page), 0)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("1 + 1  # -> 2", True),
        ("1 + 1  # -> 3", False),
        ("if True:\n    [1]  # -> [1]", True),
        ("int('x')  # raises ValueError: invalid literal", True),
        ("int('x')  # raises ValueError: something else", False),
        ("int('x')  # raises TypeError: invalid literal", False),
        ("int('1')  # raises ValueError: invalid literal", False),
    ],
)
def test_a_check_in_an_example_can_fail(text: str, holds: bool) -> None:
    try:
        exec(with_checks(text), vars(CHECKS))
    except (AssertionError, pytest.fail.Exception):
        assert not holds
    else:
        assert holds


def _chinese(page: Path) -> Path:
    name = page.name.replace(".md", ".zh-CN.md" if page.name == "README.md" else ".zh.md")
    return page.with_name(name)


PAIRS = [page for page in PAGES if _chinese(page).exists()]


def test_pages_for_everybody_exist_in_both_languages() -> None:
    chinese = {page for page in DOCS if page.name.endswith(".zh.md")}
    english = {page for name in IN_TWO_LANGUAGES for page in ROOT.glob(f"docs/{name}.md")} - chinese
    assert {page.stem for page in english} >= {*IN_TWO_LANGUAGES[:5], "01-tensors", "train"}
    assert {*map(_id, chinese)} == {_id(_chinese(page)) for page in english}


@pytest.mark.parametrize("page", PAIRS, ids=_id)
def test_both_languages_have_the_same_examples_and_structure(page: Path) -> None:
    for language in ("python", "sh", "diff", "text"):
        ours, theirs = (list(blocks(each, language)) for each in (page, _chinese(page)))
        assert [_bare(text) for _, text in ours] == [_bare(text) for _, text in theirs]
    assert _skeleton(page) == _skeleton(_chinese(page))
    english, chinese = (list(_directives(each)) for each in (page, _chinese(page)))
    assert english == chinese


def _directives(page: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the directives of a page to the site's build."""
    return ((each.kind, each.words) for each in asked(_read(page)))


def _bare(text: str) -> list[str]:
    """The lines of an example without its comments, other than checks."""
    lines = (re.sub(r"(^|\s+)# (?!->|raises ).*$", "", line) for line in text.splitlines())
    return [line for line in lines if line.strip()]


def _skeleton(page: Path) -> list[str]:
    """Return the structure of a page: levels of headings, columns of tables, list items."""
    text = BLOCK.sub("", _read(page))
    shapes = re.findall(r"^(#+) |^(\|.*\|)$|^([-*]) ", text, re.M)
    return [heading or ("|" * row.count("|")) or item for heading, row, item in shapes]


@pytest.mark.parametrize(
    "page", ["README.md", "README.zh-CN.md", "docs/index.md", "docs/index.zh.md"]
)
def test_the_first_screen_says_what_it_is_how_it_is_installed_and_shows_the_report(
    page: str,
) -> None:
    text = _read(ROOT / page)
    first, after = text.split("```sh\n", 1)
    assert "torch.amp" in first
    assert len(first.splitlines()) < 14
    assert after.startswith("pip install '.[all]'\nprecast build")
    pictures = [Path(each).name for each in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)]
    assert pictures[:2] == ["try.png", "report.png"] or pictures[0] == "report.png"
    assert after.index("report.png") < after.index("```python")


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_policy_files_in_the_text_load(page: Path, tmp_path: Path) -> None:
    for line, text in blocks(page, "toml"):
        path = tmp_path / f"line{line}.toml"
        path.write_text(text, encoding="utf-8")
        assert Policy.load(path).tables


@pytest.mark.parametrize("path", MODULES, ids=_id)
def test_examples_in_docstrings_run(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
    if not name.endswith("__main__"):  # which runs the command line
        try:
            module = importlib.import_module(name.removesuffix(".__init__"))
        except MissingExtraError as error:  # a library that `make test-clients` has
            pytest.skip(str(error))
        failed, _ = doctest.testmod(module)
        assert failed == 0


@pytest.mark.parametrize("page", DOCS, ids=_id)
def test_a_page_is_the_same_on_the_site_as_on_a_code_host(page: Path) -> None:
    """Both read Markdown, in two dialects: lists, tables and headings have to be those of both."""
    host = MarkdownIt("commonmark").enable("table").render(_read(page))
    site = markdown.markdown(_read(page), extensions=["pymdownx.superfences", "tables"])
    for tag in ("li", "ul", "ol", "td", "th", "h1", "h2", "h3", "h4", "blockquote", "a"):
        assert len(re.findall(f"<{tag}[ >]", site)) == len(re.findall(f"<{tag}[ >]", host)), tag


# --- what the text points at ---


@pytest.mark.parametrize("page", PROSE, ids=_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", _read(page)):
        link = "".join(target)
        if re.match(r"https?://", link):
            continue
        file, _, anchor = link.partition("#")
        there = (page.parent / file) if file else page
        assert there.exists(), link
        assert not anchor or anchor in _anchors(there), link
        assert there.suffix != ".png" or there.stat().st_size < 300_000, link


def _anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub names them in links."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", _read(page)), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PROSE, ids=_id)
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    for file, test in re.findall(r"`([\w/.]+/[\w.]+\.(?:py|toml))(?:::(\w+))?`", _read(page)):
        path = ROOT / file
        assert path.exists() or (ROOT / "src" / "precast" / file).exists(), file
        assert not test or test in _functions(path), f"{file}::{test}"


def _functions(path: Path) -> set[str]:
    return {n.name for n in ast.walk(ast.parse(_read(path))) if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize("page", PROSE, ids=_id)
def test_make_targets_that_are_named_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", _read(ROOT / "Makefile"), re.M)
    named = {target for command in _commands(page, "make") for target in command[1:]}
    assert named <= set(targets)


@pytest.mark.parametrize("page", PROSE, ids=_id)
def test_commands_that_are_named_exist(page: Path) -> None:
    for command in _commands(page, "precast"):
        _parse(main, command[1:])


def _commands(page: Path, program: str) -> Iterator[list[str]]:
    """The calls of a program in shell blocks and between backticks, as words."""
    shell = "\n".join(text for _, text in blocks(page, "sh"))
    text = BLOCK.sub("", _read(page))
    for line in [*shell.splitlines(), *re.findall(r"`([^`\n]+)`", text)]:
        words = re.sub(r"\s+#.*", "", line).split()
        if words[:1] == [program] and len(words) > 1:
            yield words


def _parse(command: click.Command, words: list[str]) -> None:
    """Parses a command line as the program would, and runs nothing."""
    if "--help" in words or "--version" in words:
        return
    context = command.make_context("precast", list(words), resilient_parsing=False)
    if isinstance(command, click.Group):
        name, inner, rest = command.resolve_command(context, [*words])
        assert inner is not None, name
        _parse(inner, rest)


def test_a_command_that_does_not_exist_is_seen() -> None:
    for words in (["nothing"], ["demo", "nothing"], ["demo", "--nothing"]):
        with pytest.raises(click.UsageError):
            _parse(main, words)


# --- the page that comes from the tables ---


def test_the_page_of_operations_is_what_the_tool_prints() -> None:
    committed = _read(ROOT / "docs" / "operations.md")
    assert committed == operations_page.page(), (
        "run: python -m tools.operations_page > docs/operations.md"
    )
