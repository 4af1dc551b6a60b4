"""The folder that MkDocs reads: `docs/` with what its pages ask for put in, and the files they link to as pages.

Invariants:
    - Pages of `docs/` keep their paths; a program is the page `examples/NAME.md`, any other file is below `files/`.
    - All programs that pages ask for run side by side before the first page is made.
    - All problems of all pages are told at once, each with its page and line.
    - A file that would not change is not written, so that a server that watches the folder comes to rest.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from tools.site import links, report_schema, tables
from tools.site.directives import Asked, PageError, asked, expanded, outside_code
from tools.site.pictures import Pictures
from tools.site.programs import Programs

__all__ = ["Site", "written"]

_PICTURES = "pictures"  # on the site
_HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"
_FIRST = "---\nsearch:\n  boost: 8\n---\n\n"
"""Before pages that a search should find first: who looks for "install" wants no function of that name."""
_SOUGHT = {"start.md", "start.zh.md"}
_LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".html": "html", ".txt": "text"}
_HAN = "[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"
_BROKEN_HAN = re.compile(rf"(?<={_HAN})\n[ >]*(?={_HAN})")


class Site:
    """The pages of a project's site.

    Args:
        root: the project's folder.
        cache: where output and pictures are kept between builds.
    """

    def __init__(self, root: Path, cache: Path) -> None:
        self.root = root
        self.programs = Programs(root, cache)
        self.pictures = Pictures(self.programs)
        self._problems: list[str] = []

    def write(self, folder: Path) -> list[str]:
        """Makes all pages and files in a folder, and takes away what no longer belongs there.

        Returns:
            What is wrong, each with its page and line. What cannot be put in is left as it stands.
        """
        pages, files = self.made()
        names = {*pages, *files}
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            if path.relative_to(folder).as_posix() not in names:
                path.unlink()
        for name, text in pages.items():
            written(folder / name, text.encode())
        for name, source in files.items():
            written(folder / name, source.read_bytes())
        return sorted(self._problems)

    def made(self) -> tuple[dict[str, str], dict[str, Path]]:
        """The text of each page, and where each other file comes from, by their paths on the site."""
        self._problems = []
        todo = ["examples/README.md", *self._below("docs")]
        self._run([path for path in todo if path.endswith(".md")])
        pages: dict[str, str] = {}
        files: dict[str, Path] = {}
        while todo:
            path = todo.pop()
            name = links.place(path)
            if name in pages or name in files:
                continue
            if links.is_page(path):
                pages[name] = _settings(name) + self._page(path, todo.append)
            else:
                files[name] = self.root / path
        return pages, files | {f"{_PICTURES}/{path.name}": path for path in self.pictures.drawn}

    def _below(self, folder: str) -> list[str]:
        paths = sorted((self.root / folder).rglob("*"))
        return [path.relative_to(self.root).as_posix() for path in paths if path.is_file()]

    def _run(self, pages: list[str]) -> None:
        """Runs and draws all that pages ask for, so that one does not wait for another."""
        todo = [each for page in pages for each in asked(self._read(page)) if each.words]
        there = {path.name for path in self.programs.folder.glob("*.py")}
        calls = [each.words for each in todo if each.kind == "output" and each.words[0] in there]
        self.programs.run([*calls, *((path.name,) for path in self.programs.numbered)])

    def _read(self, path: str) -> str:
        file = self.root / path
        if file.name == "README.md" and not file.exists():
            return _listing(file.parent.relative_to(self.root).as_posix(), file.parent)
        return file.read_text(encoding="utf-8")

    def _page(self, path: str, use: Callable[[str], None]) -> str:
        if path.startswith("examples/") and path.endswith(".py"):
            return self._program_page(path)
        if not path.endswith(".md"):
            return self._file_page(path)
        return self._prose(self._read(path), path, use)

    def _prose(self, text: str, path: str, use: Callable[[str], None]) -> str:
        """A page of text; links first, as what is put in has the site's own."""
        text, problems = links.relinked(text, path, self.root, use)
        self._note(path, problems)
        text, problems = expanded(text, self._makers(path))
        self._note(path, problems)
        return _joined(text) if links.place(path).endswith(".zh.md") else text

    def _note(self, path: str, problems: list[tuple[int, str]]) -> None:
        self._problems += [f"{path}:{line}: {problem}" for line, problem in problems]

    def _makers(self, path: str) -> Mapping[str, Callable[[Asked], str]]:
        language = "zh" if links.place(path).endswith(".zh.md") else "en"

        def program(each: Asked) -> str:
            name, *parts = _words(each, 1, 2, "the name of a program, and perhaps of a part of it")
            return _block(self.programs.text(name, *parts), "python", name)

        def output(each: Asked) -> str:
            words = _words(each, 1, 99, "the name of a program, and perhaps its arguments")
            return _block(self.programs.output(words), "text", f"python {' '.join(words)}")

        def picture(each: Asked) -> str:
            name = " ".join(
                _words(each, 1, 2, "the name of a program, and perhaps of a part of it")
            )
            folder = posixpath.relpath(_PICTURES, posixpath.dirname(links.place(path)) or ".")
            return self.pictures.figure(name, folder, language)

        def rules(each: Asked) -> str:
            name, device = _words(each, 2, 2, "a policy and a device type")
            return tables.rules(name, device, language)

        def difference(each: Asked) -> str:
            wanted = "a policy, the one to compare it with, and a device type"
            name, other, device = _words(each, 3, 3, wanted)
            return tables.difference(name, other, device, language)

        def schema(each: Asked) -> str:
            _words(each, 1, 1, "`report`")
            return report_schema.sections()

        made = (program, output, picture, rules, difference, schema)
        return {maker.__name__: maker for maker in made}

    def _program_page(self, path: str) -> str:
        """A program: what it says of itself, its text, and what it prints."""
        name = PurePosixPath(path).name
        text = self._read(path).strip("\n")
        says = ast.get_docstring(ast.parse(text)) or ""
        parts = [f"# {name}\n\n{says}\n", _block(text, "python", path)]
        if self.root / path in self.programs.numbered:
            try:
                parts += ["\n## What it prints\n", _block(self.programs.output((name,)), "text")]
            except PageError as problem:
                self._problems.append(f"{path}: {problem}")
        return "\n".join(parts) + "\n"

    def _file_page(self, path: str) -> str:
        file = PurePosixPath(path)
        text = self._read(path).strip("\n")
        return f"# {path}\n\n{_block(text, _LANGUAGES.get(file.suffix, 'text'))}\n"


def _settings(name: str) -> str:
    """Return the metadata of a page for MkDocs: its treatment by the search."""
    if name in _SOUGHT:
        return _FIRST
    return _HIDDEN if name.startswith("files/") else ""


def written(path: Path, contents: bytes) -> None:
    """Writes a file if that changes it."""
    if not path.exists() or path.read_bytes() != contents:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)


def _listing(name: str, folder: Path) -> str:
    """A page for a folder that has none of its own."""
    files = sorted(each.name for each in folder.iterdir() if each.is_file())
    return "\n".join([f"# {name}\n", *(f"- [{file}]({file})" for file in files)]) + "\n"


def _words(each: Asked, least: int, most: int, usage: str) -> tuple[str, ...]:
    if not least <= len(each.words) <= most:
        raise PageError(f"`{each.kind}:` is followed by {usage}; here by {' '.join(each.words)!r}")
    return each.words


def _block(text: str, language: str, title: str = "") -> str:
    """A code block whose fence is longer than any in the text."""
    longest = max((len(ticks) for ticks in re.findall("`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    head = f'{language} title="{title}"' if title else language
    return f"{fence}{head}\n{text.rstrip()}\n{fence}"


def _joined(text: str) -> str:
    """Chinese prose without the line breaks of its file, which a browser would show as spaces."""
    prose = {number for number, _ in outside_code(text)}
    lines = text.split("\n")
    for number in range(len(lines) - 1, 0, -1):
        two = f"{lines[number - 1]}\n{lines[number]}"
        if {number, number + 1} <= prose and _BROKEN_HAN.search(two):
            lines[number - 1 : number + 1] = [_BROKEN_HAN.sub("", two)]
    return "\n".join(lines)
