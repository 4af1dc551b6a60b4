"""A document as a notebook shows it: the command and the verdict in words; in all else it is a dict."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from precast.diagnostics.records import from_json
from precast.diagnostics.report.ranks import summary_of_ranks
from precast.diagnostics.schema import Document

__all__ = ["Shown"]


class Shown(dict[str, Any]):
    """A document that is as the schema says."""

    def _repr_html_(self) -> str:
        plain = self.get("ranks", [self])
        documents = [from_json(Document, dict(each)) for each in plain]
        verdict = summary_of_ranks(documents)
        many = f", {len(documents):,} ranks" if len(documents) > 1 else ""
        said = [verdict.headline, *verdict.problems, *verdict.precision]
        items = "".join(f"<li>{_html(sentence)}</li>" for sentence in said)
        command = escape(" ".join(documents[0].run.command))
        return f"<p><b>precast run {command}</b>{many}</p><ul>{items}</ul>"


def _html(sentence: str) -> str:
    """A sentence in which text between backticks is a name."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(sentence))
