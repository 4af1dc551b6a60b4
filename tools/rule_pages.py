"""The pages of `precast check`'s rules, from the rules: `python -m tools.rule_pages` writes docs/rules/."""

from __future__ import annotations

from pathlib import Path

from precast.rewrite.pages import index, page
from precast.rewrite.registry import all_rules

__all__ = ["main", "pages"]

FOLDER = Path(__file__).parent.parent / "docs" / "rules"


def pages() -> dict[str, str]:
    """The text of every page by its file name."""
    texts = {f"{rule.code}.md": page(rule) for rule in all_rules().values()}
    return texts | {"README.md": index()}


def main() -> None:
    """Writes the pages, and deletes those of rules that are no more."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    texts = pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
