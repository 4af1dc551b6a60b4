"""Looks at the built site: links and anchors lead somewhere, nothing comes from elsewhere, search is full.

    python -m tools.site.check build/site

Invariants: it reads what a browser would get, and knows nothing of MkDocs or of the pages behind it.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["main", "problems"]

_LOADS = {("img", "src"), ("script", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}
_HAN = re.compile("[\u4e00-\u9fff]")


class _Page(HTMLParser):
    """The anchors of a page, where it links to, and what a browser loads for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value for name, value in attrs if value is not None}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        for name in attributes.keys() & {"href", "src"}:
            loaded = (tag, name) in _LOADS and attributes.get("rel") not in {
                "canonical",
                "alternate",
            }
            (self.loads if loaded else self.links).append(attributes[name])


class _Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def pages(self) -> dict[Path, _Page]:
        return {path: _Page(path) for path in sorted(self.folder.rglob("*.html"))}

    def broken(self, page: Path, link: str) -> str | None:
        """Return the problem of a link, or None."""
        split = urlsplit(link)
        if split.scheme or split.netloc:
            return None
        path = page
        if split.path:
            start = self.folder if link.startswith("/") else page.parent
            path = (start / unquote(split.path).lstrip("/")).resolve()
            path = path / "index.html" if path.is_dir() else path
        if not path.is_file():
            return f"{link} leads nowhere"
        anchor = unquote(split.fragment)
        marked = anchor and not anchor.startswith(("only-", "__"))
        if marked and path in self.pages and anchor not in self.pages[path].anchors:
            return f"{link}: there is no such place on that page"
        return None


def problems(folder: Path) -> list[str]:
    """A line for each thing that is wrong with a built site."""
    site, faults = _Site(folder.resolve()), []
    for path, page in site.pages.items():
        name = path.relative_to(site.folder).as_posix()
        elsewhere = [link for link in page.loads if urlsplit(link).netloc]
        faults += [f"{name}: loads {link} from elsewhere" for link in elsewhere]
        broken = (site.broken(path, link) for link in dict.fromkeys([*page.links, *page.loads]))
        faults += [f"{name}: {problem}" for problem in broken if problem]
    return faults + _search_problems(site)


def _search_problems(site: _Site) -> list[str]:
    """Return the problems of the search index: missing languages, and pages that are in it twice or do not exist."""
    entries = json.loads((site.folder / "search" / "search_index.json").read_text("utf-8"))["docs"]
    places = [entry["location"] for entry in entries]
    faults = [f"search: {place} is there twice" for place in _twice(places)]
    home = site.folder / "index.html"
    faults += [f"search: {problem}" for p in places if (problem := site.broken(home, p or "."))]
    han = [entry for entry in entries if _HAN.search(entry["title"] + entry["text"])]
    if len(han) == len(entries) or not entries:
        faults.append("search: nothing in English")
    if (site.folder / "zh").is_dir() and not any("\u200b" in entry["text"] for entry in han):
        faults.append("search: nothing in Chinese that is cut into words")
    return faults


def _twice(names: list[str]) -> list[str]:
    earlier: set[str] = set()
    return [name for name in names if name in earlier or earlier.add(name)]  # type: ignore[func-returns-value]


def main(folder: str) -> int:
    """Prints problems; 1 if there are any."""
    faults = problems(Path(folder))
    print("\n".join(faults) or "every link leads somewhere, nothing is loaded from elsewhere")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
