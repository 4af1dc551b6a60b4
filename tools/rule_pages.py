"""Pages and index of the rules of precast-lint: `python -m tools.rule_pages` writes docs/rules/ and the index.

The index is what `precast-lint check` asks before it loads a rule: see `lint/src/precast_lint/selecting/registry.py`.
"""

from __future__ import annotations

from pathlib import Path

from precast_lint.output.pages import overview, page
from precast_lint.selecting.registry import all_rules, modules

__all__ = ["index_file", "main", "pages"]

_ROOT = Path(__file__).parent.parent
FOLDER = _ROOT / "docs" / "rules"
INDEX = _ROOT / "lint" / "src" / "precast_lint" / "selecting" / "index.py"


def pages() -> dict[str, str]:
    """The text of every page by its file name."""
    texts = {f"{rule.code}.md": page(rule) for rule in all_rules().values()}
    return texts | {"README.md": overview()}


def index_file() -> str:
    """The text of the index: a line for each rule."""
    rows = []
    for module, rule in modules():
        fields = (rule.code, module, rule.name, rule.severity.value, rule.words)
        rows.append(f"    {fields!r},\n".replace("'", '"'))
    says = "The short data of all rules, for use before a rule is loaded. Written by `python -m tools.rule_pages`."
    head = f'"""{says}"""\n\n# fmt: off\n# ruff: noqa: E501'
    kind = "tuple[tuple[str, str, str, str, tuple[str, ...]], ...]"
    return f"{head}\nRULES: {kind} = (\n{''.join(rows)})\n"


def main() -> None:
    """Writes the pages and the index, and deletes the pages of rules that are no more."""
    INDEX.write_text(index_file(), encoding="utf-8")
    FOLDER.mkdir(parents=True, exist_ok=True)
    texts = pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
