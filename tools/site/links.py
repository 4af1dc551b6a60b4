"""Links that leave `docs/`: on the site they lead to pages made of the files they name.

Invariants:
    - What is in a code block, between backticks, or on another host stays as it is.
    - A page leads to pages in its own language.
    - `place` is the only one that knows where a file of the project stands on the site.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from tools.site.directives import PageError, outside_code

__all__ = ["is_page", "place", "relinked"]

_LINK = re.compile(r"(?P<code>`+).*?(?P=code)|(?P<before>\]\(|src=\"|href=\")(?P<to>[^)\s\"#]+)")
_ABROAD = re.compile(r"[a-z]+:|/")
_RAW = {".json", ".png", ".svg", ".css", ".js"}


def place(path: str) -> str:
    """Return the path of a file of the project in the folder that MkDocs reads; both with forward slashes."""
    path = path.replace(".zh-CN.", ".zh.")
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if not is_page(path):
        return f"files/{path}"
    file = PurePosixPath(path if path.startswith("examples/") else f"files/{path}")
    if path.startswith("examples/") and file.suffix == ".py":
        return str(file.with_suffix(".md"))
    # a dot in a name would be read as the mark of a language
    return str(file if file.suffix == ".md" else file.with_name(f"{_undotted(file)}.md"))


def is_page(path: str) -> bool:
    """Return True if a file is shown as a page; data and pictures are files beside the pages."""
    return PurePosixPath(path).suffix not in _RAW


def relinked(
    text: str, path: str, root: Path, use: Callable[[str], None]
) -> tuple[str, list[tuple[int, str]]]:
    """A page with links as the site has them, and lines with problems.

    Args:
        text: the page.
        path: its path in the project, `docs/usage.md`.
        root: the project's folder.
        use: is told the path in the project of each file that is linked.
    """
    lines, problems = text.split("\n"), []

    def changed(match: re.Match[str]) -> str:
        if match["code"] or _ABROAD.match(match["to"]):
            return match[0]
        target = _target(match["to"], path, root)
        use(target)
        there = place(target)
        if not place(path).endswith(".zh.md"):
            there = there.replace(".zh.md", ".md")  # the theme leads to the other language
        there = posixpath.relpath(there, posixpath.dirname(place(path)) or ".")
        return f"{match['before']}{there}"

    for number, line in outside_code(text):
        try:
            lines[number - 1] = _LINK.sub(changed, line)
        except PageError as problem:
            problems.append((number, str(problem)))
    return "\n".join(lines), problems


def _target(link: str, path: str, root: Path) -> str:
    """The file of the project that a link leads to; for a folder its README, there or not."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if target.startswith("../") or not (root / target).exists():
        raise PageError(f"the link to {link} leads to no file of the project")
    return f"{target}/README.md" if (root / target).is_dir() else target


def _undotted(file: PurePosixPath) -> str:
    return file.name.replace(".", "-")
