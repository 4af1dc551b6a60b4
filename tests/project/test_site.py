"""The site's build: what pages ask for is put in, links lead to pages, and what is wrong is said with its line."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import griffe
import pytest

import precast
from precast.policy.rows import Rule
from tools.operations_page import for_all_versions
from tools.site import tables
from tools.site.directives import Asked, PageError, asked, expanded, outside_code
from tools.site.drawings import DRAWINGS
from tools.site.links import place, relinked
from tools.site.pages import Site
from tools.site.pictures import PICTURES
from tools.site.programs import Programs
from tools.site.values import Values

ROOT = Path(__file__).parents[2]

# --- directives ---

PAGE = """\
# Title

<!-- program: a.py f -->

- a list

  <!-- output: a.py --steps 5 -->

<!-- figures: of somebody else -->

```text
<!-- output: not this.py -->
```
"""


def test_what_a_page_asks_for_is_found_with_its_line() -> None:
    assert list(asked(PAGE)) == [
        Asked(3, "program", ("a.py", "f")),
        Asked(7, "output", ("a.py", "--steps", "5"), "  "),
    ]


def test_what_is_put_in_stands_where_the_comment_stood() -> None:
    def made(each: Asked) -> str:
        return f"one {each.words[-1]}\n\ntwo\n"

    text, problems = expanded(PAGE, {"program": made, "output": made})
    assert not problems
    assert text.split("\n")[2:5] == ["one f", "", "two"]
    assert text.split("\n")[8:11] == ["  one 5", "", "  two"]
    assert text.endswith(PAGE[PAGE.index("<!-- figures") :])


@pytest.mark.parametrize("word", ["programm", "outputs", "Output", "rule", "pictur", "diference"])
def test_a_misspelt_comment_is_a_problem(word: str) -> None:
    _, problems = expanded(f"x\n<!-- {word.lower()}: 01.py -->", {})
    assert [line for line, _ in problems] == [2]
    assert "there are program, output, picture, rules, difference" in problems[0][1]


def test_code_ends_with_a_fence_as_long_as_the_one_it_began_with() -> None:
    text = "a\n````md\n```\nb\n```\n````\nc\n~~~\n```\n~~~\nd"
    assert [line for _, line in outside_code(text)] == ["a", "c", "d"]


# --- programs ---

PROGRAM = '''\
"""Says something."""

import sys

WORDS: tuple[str, ...] = ("one",)


@property
def decorated(x):
    """Of one line."""
    return x


class Thing:
    pass


def main():
    print(*WORDS, *sys.argv[1:])
    print("noise", file=sys.stderr)


if __name__ == "__main__":
    main()
'''


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "01_words.py").write_text(PROGRAM)
    return Programs(tmp_path, tmp_path / "cache")


def test_a_part_of_a_program_is_the_whole_of_it(programs: Programs) -> None:
    assert programs.text("01_words.py") == PROGRAM.strip()
    decorated = programs.text("01_words.py", "decorated")
    assert decorated.startswith("@property\ndef decorated")
    assert decorated.endswith("return x")
    assert programs.text("01_words.py", "Thing") == "class Thing:\n    pass"
    assert programs.text("01_words.py", "WORDS") == 'WORDS: tuple[str, ...] = ("one",)'


def test_output_is_what_the_program_prints_and_nothing_else(programs: Programs) -> None:
    assert programs.output(("01_words.py",)) == "one\n"
    assert programs.output(("01_words.py", "two", "--three")) == "one two --three\n"


def test_a_program_that_fails_says_how(programs: Programs) -> None:
    path = programs.folder / "02_fails.py"
    path.write_text("print('before')\nraise RuntimeError('the reason')\n")
    with pytest.raises(PageError, match=r"(?s)02_fails.py --x.*exit code 1.*the reason") as caught:
        programs.output(("02_fails.py", "--x"))
    assert "before" not in str(caught.value)
    path.write_text("raise SystemExit(3)\n")
    with pytest.raises(PageError, match="exit code 3"):
        Programs(programs.root, programs.root / "cache").output(("02_fails.py",))


def test_a_program_runs_again_only_when_something_has_changed(programs: Programs) -> None:
    path = programs.folder / "02_runs.py"
    path.write_text("open('runs', 'a').write('x')\nprint(len(open('runs').read()))\n")
    cache, root = programs.root / "cache", programs.root
    assert [Programs(root, cache).output(("02_runs.py",)) for _ in range(2)] == ["1\n", "1\n"]
    assert Programs(root, cache).output(("02_runs.py", "other")) == "2\n"
    (programs.folder / "01_words.py").write_text("# something that it might import\n")
    assert Programs(root, cache).output(("02_runs.py",)) == "3\n"


# --- links ---


@pytest.mark.parametrize(
    ("path", "there"),
    [
        ("docs/guide/01-tensors.zh.md", "guide/01-tensors.zh.md"),
        ("docs/data/clients.json", "data/clients.json"),
        ("examples/01_tensors.py", "examples/01_tensors.md"),
        ("examples/integrations/with_lightning.py", "examples/integrations/with_lightning.md"),
        ("examples/README.md", "examples/README.md"),
        (
            "src/precast/policy/presets/default.toml",
            "files/src/precast/policy/presets/default-toml.md",
        ),
        ("CONTRIBUTING.md", "files/CONTRIBUTING.md"),
        ("LICENSE", "files/LICENSE.md"),
        ("README.md", "files/README.md"),
        ("README.zh-CN.md", "files/README.zh.md"),
        ("benchmarks/results/a.json", "files/benchmarks/results/a.json"),
    ],
)
def test_each_file_has_its_place_on_the_site(path: str, there: str) -> None:
    assert place(path) == there


def test_links_out_of_the_docs_lead_to_pages_of_the_site() -> None:
    text = (
        "[p](../../examples/01_tensors.py) [all](../../examples) [u](../usage.md#a) [here](#x)\n"
        "[web](https://example.org/a.py) `[code](../../gone.py)` [toml](../../pyproject.toml)\n"
        "```md\n[in code](../../gone.py)\n```\n"
        "![picture](../images/report.png)"
    )
    used: list[str] = []
    new, problems = relinked(text, "docs/guide/01-tensors.md", ROOT, used.append)
    assert not problems
    assert new == (
        "[p](../examples/01_tensors.md) [all](../examples/README.md) [u](../usage.md#a) [here](#x)\n"
        "[web](https://example.org/a.py) `[code](../../gone.py)` [toml](../files/pyproject-toml.md)\n"
        "```md\n[in code](../../gone.py)\n```\n"
        "![picture](../images/report.png)"
    )
    assert used[:2] == ["examples/01_tensors.py", "examples/README.md"]


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_a_page_leads_to_its_own_language(page: str) -> None:
    text, problems = relinked("[zh](README.zh-CN.md)", page, ROOT, lambda path: None)
    assert not problems
    assert text == ("[zh](README.md)" if page == "README.md" else "[zh](README.zh.md)")


@pytest.mark.parametrize("link", ["gone.md", "../gone.py", "../../outside.md", "../gone"])
def test_a_link_to_nothing_is_a_problem_with_its_line(link: str) -> None:
    _, problems = relinked(f"one\n[two]({link})", "docs/usage.md", ROOT, lambda path: None)
    assert problems == [(2, f"the link to {link} leads to no file of the project")]


# --- tables ---


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_rules_of_a_policy_are_all_there(language: str) -> None:
    entries = for_all_versions("default").rules("cuda")
    _, _, *rows = tables.rules("default", "cuda", language).split("\n")
    reports = {}
    for row in rows:
        rule, meaning, names = row.strip("| ").split(" | ")
        which = Rule(rule.strip("`"))
        assert meaning == (tables.CHINESE[which] if language == "zh" else which.meaning)
        reports |= dict.fromkeys(re.findall(r"`([\w.:]+)`", names), which)
    assert reports == {key.removeprefix("aten::"): entry.rule for key, entry in entries.items()}


def test_a_difference_is_what_makes_one_policy_of_the_other() -> None:
    lean, default = (for_all_versions(name).rules("cpu") for name in ("lean", "default"))
    reports = tables.difference("lean", "default", "cpu")
    differ = {key for key in {*lean, *default} if lean.get(key) != default.get(key)}
    head, _, *rows = reports.split("\n")
    assert head == "| operations on `cpu` | `default` | `lean` | why |"
    names = [name for row in rows for name in re.findall(r"`([\w.]+)`", row.split(" | ")[0])]
    assert sorted(names) == sorted(key.removeprefix("aten::") for key in differ)
    for row in rows:
        key = f"aten::{re.findall('`([^`]+)`', row)[0]}"
        assert f"`{lean[key].rule}` | {lean[key].reason}" in row


def test_every_rule_is_said_in_chinese() -> None:
    assert set(tables.CHINESE) == set(Rule)


# --- pages ---


@pytest.fixture
def project(programs: Programs) -> Path:
    root = programs.root
    (root / "docs" / "guide").mkdir(parents=True)
    (root / "examples" / "README.md").write_text("# Programs\n\n[words](01_words.py)\n")
    (root / "docs" / "index.md").write_text("# Home\n\n[words](../examples/01_words.py)\n")
    (root / "docs" / "guide" / "one.md").write_text(
        "# One\n\n<!-- program: 01_words.py Thing -->\n\n<!-- output: 01_words.py two -->\n"
    )
    (root / "docs" / "guide" / "one.zh.md").write_text(
        "# 一\n\n混合\n精度 with\n一行\n\n- 甲\n- 乙\n"
    )
    return root


def written(project: Path, problems: list[str] | None = None) -> dict[str, str]:
    folder = project / "pages"
    folder.mkdir(exist_ok=True)
    result = Site(project, project / "cache").write(folder)
    reports = [problem.split(": ")[0] for problem in result]
    assert reports == (problems or []), result
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in paths}


def test_pages_have_what_they_ask_for(project: Path) -> None:
    pages = written(project)
    assert pages["guide/one.md"] == (
        '# One\n\n```python title="01_words.py"\nclass Thing:\n    pass\n```\n\n'
        '```text title="python 01_words.py two"\none two\n```\n'
    )
    assert pages["index.md"] == "# Home\n\n[words](examples/01_words.md)\n"
    assert pages["examples/01_words.md"].startswith("# 01_words.py\n\nSays something.\n")
    assert pages["examples/01_words.md"].endswith("## What it prints\n\n```text\none\n```\n")
    assert set(pages) == {
        *("index.md", "guide/one.md", "guide/one.zh.md"),
        *("examples/README.md", "examples/01_words.md"),
    }


def test_chinese_has_no_spaces_where_its_lines_end(project: Path) -> None:
    assert written(project)["guide/one.zh.md"] == "# 一\n\n混合精度 with\n一行\n\n- 甲\n- 乙\n"


def test_all_problems_are_told_with_page_and_line(project: Path) -> None:
    (project / "docs" / "index.md").write_text("# Home\n\n[gone](gone.md)\n")
    (project / "docs" / "guide" / "one.md").write_text(
        "# One\n<!-- program: 09.py -->\n<!-- program: 01_words.py gone -->\n<!-- outputs: 1 -->\n"
        "<!-- rules: default -->\n<!-- rules: mine cpu -->\n<!-- picture: 01_words.py -->\n"
    )
    lines = [*(f"docs/guide/one.md:{number}" for number in range(2, 8)), "docs/index.md:3"]
    pages = written(project, problems=lines)
    assert "<!-- program: 09.py -->" in pages["guide/one.md"]  # for who builds while writing


def test_every_picture_is_drawn_and_described_in_both_languages() -> None:
    assert set(PICTURES) == set(DRAWINGS)
    for name, picture in PICTURES.items():
        assert (ROOT / "examples" / name.split()[0]).exists()
        assert set(picture.alt) == set(picture.caption) == {"en", "zh"}


# --- the API ---

_MODULES = ["report/__init__.py", "integrations/[a-z]*.py"]
_INTERNAL = {"precast.report.needed"}  # for precast itself


def _told() -> list[str]:
    pages = [path.read_text("utf-8") for path in (ROOT / "docs" / "api").glob("*.md")]
    return [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.M)]


def _is_public(name: str, module: str) -> bool:
    """Return True if `precast` has this object under its name, which other modules may give to something else."""
    known = getattr(precast, name, None) if name in precast.__all__ else None
    return known is not None and getattr(known, "__module__", module).startswith(module)


def test_every_public_name_is_on_one_page_of_the_api() -> None:
    homes = {name: getattr(precast, name) for name in ("errors", "events", "fsdp", "optim")}
    public = {f"precast.{name}" for name in precast.__all__ if name not in homes}
    public -= {"precast.__version__"}
    public |= {f"precast.{home}.{name}" for home in homes for name in homes[home].__all__}
    files = [sorted((ROOT / "src" / "precast").glob(pattern)) for pattern in _MODULES]
    assert all(files), "a pattern that finds no file checks nothing"
    for path in (path for result in files for path in result):
        module = _module(path)
        public |= {f"{module}.{name}" for name in _all(path) if not _is_public(name, module)}
    assert sorted(_told()) == sorted(public - _INTERNAL)


@pytest.mark.parametrize("name", _told())
def test_a_docstring_reads_as_markdown(name: str) -> None:
    """Examples are in a section of their own; stars and colons that Markdown or reST would take are not bare."""
    result = _package()[name.removeprefix("precast.")]
    members = result.members.values() if result.is_class else ()
    for each in [result, *(member for member in members if member.is_public)]:
        for section in each.docstring.parse("google") if each.docstring else ():
            if section.kind is not griffe.DocstringSectionKind.examples:
                values = section.value if isinstance(section.value, list) else [section.value]
                text = "\n".join(
                    getattr(value, "description", None) or str(value) for value in values
                )
                bare = re.sub(r"(`+).+?\1", "", text, flags=re.S)
                assert not re.search(r"^>>>|\*\*|::$", bare, re.M), f"{each.path}: {bare}"


MODULE = """
import precast
from precast import errors
from precast._internal.display import Displayed

MOST = 40
class _Limits:
    least = 2.0**-3
    name = "raise"
LIMITS = _Limits()
_REQUIRED = "(required)"
TABLE = {}

class Reader(precast.Trace, Displayed): ...
class Wrong(errors.PrecastError): ...

def f(a=_REQUIRED, b=MOST, c=LIMITS.least, d=LIMITS.name, e=2.0**16, f=TABLE, g=max, h=None): ...
"""


def test_a_default_is_shown_as_its_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "with_defaults.py").write_text(MODULE)
    extensions = griffe.load_extensions(Values)
    result = griffe.load("with_defaults", search_paths=[tmp_path], extensions=extensions)
    shown = [None if p.default is None else str(p.default) for p in result["f"].parameters]
    assert shown == [None, "40", "0.125", "'raise'", "2.0 ** 16", "TABLE", "max", "None"]
    bases = {name: [str(base) for base in result[name].bases] for name in ("Reader", "Wrong")}
    assert bases == {"Reader": ["precast.Trace"], "Wrong": ["errors.PrecastError"]}


def test_every_entry_of_the_navigation_has_a_name_in_chinese() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    translated, navigation = settings.split("nav_translations:")[1].split("\nnav:\n")
    names = set(re.findall(r'^ +- "?([^"\n]+?)"?:(?: |$)', navigation, re.M))
    translations = dict(re.findall(r'^ {12}"?([^"\n]+?)"?: (.+)$', translated, re.M))
    assert {"Usage", "Policies", "Guide"} <= names
    assert names == set(translations)
    assert all(re.search("[\u4e00-\u9fff]", text) for text in translations.values())


@functools.cache
def _package() -> griffe.Module:
    result = griffe.load("precast", search_paths=[ROOT / "src"], resolve_aliases=True)
    assert isinstance(result, griffe.Module)
    return result


def _module(path: Path) -> str:
    names = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(names).removesuffix(".__init__")


def _all(path: Path) -> list[str]:
    """`__all__` of a file that perhaps cannot be imported here."""
    (names,) = (
        node.value
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    result: list[str] = ast.literal_eval(names)
    return result
