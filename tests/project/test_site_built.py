"""The site that MkDocs builds: a small one, with the settings of the project, and what is wrong with a bad one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.site.check import main, problems

ROOT = Path(__file__).parents[2]
PAGES = {
    "docs/index.md": "# Home\n\nA gradient scaler.\n\n[one](guide/one.md#the-second) [p](../examples/01_a.py)\n",
    "docs/index.zh.md": "# 首页\n\n混合精度训练。[一](guide/one.zh.md#第二)\n",
    "docs/guide/one.md": "# One\n\n## The second\n\n<!-- output: 01_a.py -->\n\n::: precast.policy.rows.Rule\n",
    "docs/guide/one.zh.md": "# 一\n\n## 第二\n\n<!-- output: 01_a.py -->\n",
    "docs/start.md": "# Start\n\n## Install precast\n\nHow.\n",
    "docs/start.zh.md": "# 开始\n\n## 安装\n\n方法。\n",
    "examples/README.md": "# Programs\n\n[a](01_a.py)\n",
    "examples/01_a.py": '"""Prints."""\n\nprint("unmistakable", "output")\n',
}
NAV = "nav:\n  - index.md\n  - guide/one.md\n  - start.md\n  - examples/README.md\n"


def mkdocs(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(folder / "mkdocs.yml")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def settings() -> str:
    """Return the settings of the project, without its navigation."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    text = text[: text.index("\nnav:\n") + 1].replace("tools/site/", f"{ROOT}/tools/site/")
    text = text.replace("paths: [src]", f"paths: [{ROOT}/src]")
    return re.sub(r"^(watch|extra_css): .*\n", "", text, flags=re.M)


def project(folder: Path, **changed: str) -> Path:
    files = {**PAGES, "mkdocs.yml": settings() + NAV} | changed
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    (folder / "build" / "pages").mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = project(tmp_path_factory.mktemp("site"))
    built = mkdocs(folder)
    assert not built.returncode, built.stderr
    return folder / "build" / "site"


def test_a_site_without_mistakes_has_none(site: Path) -> None:
    assert problems(site) == []
    assert main(str(site)) == 0


def test_output_is_on_the_pages_of_both_languages(site: Path) -> None:
    for page in ("guide/one", "zh/guide/one", "examples/01_a", "zh/examples/01_a"):
        assert "unmistakable output" in (site / page / "index.html").read_text("utf-8")


def test_each_language_has_its_pages_and_leads_to_the_other(site: Path) -> None:
    english, chinese = ((site / name / "index.html").read_text("utf-8") for name in (".", "zh"))
    assert '<html lang="en"' in english
    assert 'hreflang="zh"' in english
    assert '<html lang="zh"' in chinese
    assert "混合精度训练" in chinese


def test_search_knows_both_languages_and_cuts_chinese_into_words(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    texts = {entry["location"]: entry["text"] for entry in index["docs"]}
    assert "A gradient scaler." in texts[""]
    assert {"混合", "精度", "训练"} <= set(texts["zh/"].split("\u200b"))
    assert "zh/examples/" not in texts  # in English there, too, and once is enough
    assert index["config"]["lang"] == ["en", "zh"]


def test_start_here_is_found_before_what_has_the_word_in_its_name(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    boosts = {entry["location"]: entry.get("boost", 1) for entry in index["docs"]}
    assert {boosts[place] for place in ("start/", "zh/start/", "start/#install-precast")} == {8}
    assert boosts["guide/one/"] == 1


def test_a_docstring_is_on_its_page(site: Path) -> None:
    page = (site / "guide" / "one" / "index.html").read_text("utf-8")
    assert 'id="precast.policy.rows.Rule"' in page
    assert "floating-point arguments" in page


def test_what_cannot_be_put_in_fails_the_build(tmp_path: Path) -> None:
    wrong = {
        "docs/guide/one.md": "# One\n\n<!-- output: 02.py -->\n\n[x](gone.md)\n",
        "examples/01_a.py": "raise RuntimeError('why it fails')\n",
    }
    built = mkdocs(project(tmp_path, **wrong))
    assert built.returncode
    assert "docs/guide/one.md:3: there is no program examples/02.py" in built.stderr
    assert "docs/guide/one.md:5: the link to gone.md leads to no file" in built.stderr
    assert "docs/guide/one.zh.md:5: `python examples/01_a.py` failed" in built.stderr
    assert "RuntimeError: why it fails" in built.stderr


def test_what_mkdocs_warns_of_fails_the_build(tmp_path: Path) -> None:
    wrong = {
        "docs/guide/one.md": "# One\n\n[x](#gone) [2] [3]\n",
        "docs/other.md": "# Not in the navigation\n",
    }
    built = mkdocs(project(tmp_path, **wrong))
    assert built.returncode
    for says in ("'#gone'", "target '3'", "other.md"):
        assert re.search(f"(WARNING|ERROR).*{says}|\\n *- {says}", built.stderr)


def test_what_is_wrong_with_a_site_is_said(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    (tmp_path / "zh").mkdir()
    (tmp_path / "a.html").write_text('<h1 id="here">a</h1>')
    (tmp_path / "index.html").write_text(
        '<script src="https://cdn.example.org/x.js"></script><img src="gone.png">'
        '<a href="a.html#here">1</a><a href="a.html#there">2</a><a href="b.html">3</a>'
        '<a href="https://example.org">4</a><a href="mailto:a@b.c">5</a><a href="#">6</a>'
    )
    entry = {"title": "A", "text": "b"}
    entries = [entry | {"location": place} for place in ("a.html", "a.html", "c.html")]
    (tmp_path / "search" / "search_index.json").write_text(json.dumps({"docs": entries}))
    assert problems(tmp_path) == [
        "index.html: loads https://cdn.example.org/x.js from elsewhere",
        "index.html: a.html#there: there is no such place on that page",
        "index.html: b.html leads nowhere",
        "index.html: gone.png leads nowhere",
        "search: a.html is there twice",
        "search: c.html leads nowhere",
        "search: nothing in Chinese that is cut into words",
    ]
    assert main(str(tmp_path)) == 1
