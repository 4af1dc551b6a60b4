"""The report as one HTML file, which needs no network and no server.

Invariants: all text of the user's program is escaped, in HTML by the template and in the data as JSON without `<`, so
that it cannot end a tag; the page's content security policy forbids every request. The summary and the findings need
no script.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from precast._internal import atomic_write, version
from precast._internal.display import plural
from precast._internal.missing import missing_extra
from precast._internal.records import as_json
from precast.report.document import checked
from precast.report.evidence import in_16_bits, lost, on_casts, rows_of
from precast.report.numbers import in_words, offender
from precast.report.ranks import summary_of_ranks, worst
from precast.report.remedies import Remedy, cost_words, remedies
from precast.report.run_summary import summary_of
from precast.report.schema import MergedDocument, RunDocument
from precast.report.tree import tree
from precast.report.words import count, duration, share, with_code

__all__ = ["PagePart", "html", "needed", "page_of", "page_of_parts", "write"]

PagePart = tuple[str, str, Any]
"""A heading, a kind and the content: a "table" of rows, a "list" of sentences, "code", a "text", or a "chart", whose
content is the curves and the layout for Plotly."""
_SCRIPTS = ("words.js", "table.js", "tree.js", "charts.js")


def write(document: RunDocument | MergedDocument | dict[str, Any], path: str | Path) -> None:
    """Write the page of a document, completely or not at all.

    Raises:
        ReportError: the document does not match the schema.
        MissingExtraError: jinja2 or plotly is not installed.
        OutputError: the file could not be written. An existing file is not changed.
    """
    atomic_write.replace_own(Path(path), html(document).encode("utf-8", "replace"))


def html(document: RunDocument | MergedDocument | dict[str, Any]) -> str:
    """Return the page of a document as text."""
    plain, every = checked(document)
    chosen, overall = worst(every), summary_of_ranks(every)
    data = {
        "document": {**plain, "summary": as_json(overall)},
        "chosen": chosen,
        "parts": [
            {
                "tree": [asdict(node) for node in tree(each.trace)] if each.trace else [],
                "numbers": _numbers(each),
            }
            for each in every
        ],
    }
    command = " ".join(every[0].run.command) or "a run"
    return page_of(
        _asset("page.html.jinja"),
        data,
        script=_asset("main.js"),
        title=f"{command} - precast",
        version=version.__version__,
        command=command,
        summary=overall,
        parts=[_part(each) for each in every],
        chosen=chosen,
        made=plain["made"],
    )


def page_of(template: str, data: object, *, script: str, style: str = "", **values: Any) -> str:
    """Return a page with the report's styles, and its scripts for tables, trees and charts.

    Args:
        template: the text of a template that extends "base.html.jinja".
        data: the data for the scripts, without infinity and NaN.
        script: a script that runs after those of the report.
        style: styles that follow those of the report.
        values: the values of the template; "title" and "version" are those of the base.

    Raises:
        MissingExtraError: jinja2 or plotly is not installed.
    """
    jinja2, plotly = needed()
    from markupsafe import Markup as AsItIs  # precast's own text

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["marked"] = _marked
    page: str = environment.from_string(template).render(
        style=AsItIs(_asset("style.css") + style),
        data=jinja2.utils.htmlsafe_json_dumps(data, allow_nan=False, separators=(",", ":")),
        plotly=AsItIs(plotly),
        script=AsItIs("\n".join([*map(_asset, _SCRIPTS), script])),
        **values,
    )
    return page


def page_of_parts(title: str, headline: str, parts: Iterable[PagePart]) -> str:
    """Return a page of parts, each with its heading; those without content are left out."""
    filled = [each for each in parts if each[2]]
    numbered = enumerate(filled, 1)
    charts = [(f"chart{n}", content) for n, (_, kind, content) in numbered if kind == "chart"]
    return page_of(
        _asset("parts.html.jinja"),
        charts,
        script=_asset("parts.js"),
        style=_asset("parts.css"),
        title=title,
        headline=headline,
        parts=filled,
        version=version.__version__,
    )


def needed() -> tuple[Any, str]:
    """Return the template engine, and the chart library's script. Call it before a long computation.

    Raises:
        MissingExtraError: one of them is not installed.
    """
    package = "jinja2"
    try:
        import jinja2

        package = "plotly"
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise missing_extra("the report's page", package, "report") from error
    return jinja2, get_plotlyjs()


def _asset(name: str) -> str:
    return resources.files("precast.report").joinpath("assets", name).read_text("utf-8")


def _marked(text: str) -> Any:
    """Return an escaped sentence, with the text between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(with_code(str(escape(text))))


# --- parts of the page that need no script ---


def _part(document: RunDocument) -> dict[str, Any]:
    rank, groups = document.run.rank, remedies(document)
    small = sum(len(each.findings) for each in groups if not each.is_telling)
    omitted = f"{plural(small, 'finding')} about less than 1% of the traced time omitted."
    return {
        "rank": rank,
        "label": "The process" if rank is None else f"Rank {rank}",
        "summary": summary_of(document),
        "facts": [(name, value) for name, value in _facts(document).items() if value],
        "findings": [_card(each) for each in groups if each.is_telling],
        "small": omitted if small else "",
    }


def _facts(document: RunDocument) -> dict[str, str]:
    run, is_traced = document.run, bool(rows_of(document))
    return {
        "Steps": count(run.steps),
        "Skipped": count(lost(document)),
        "Took": duration(run.seconds),
        "In 16 bits": f"{share(in_16_bits(document))} of the traced time" if is_traced else "",
        "On casts": f"{share(on_casts(document))} of the traced time" if is_traced else "",
        "Ended": run.ended if run.code in (0, None) else f"{run.ended}, code {run.code}",
        "Policy": run.policy.name,
        "Devices": ", ".join(run.devices),
        "PyTorch": run.torch,
        "Python": run.python,
        "Machine": run.machine,
    }


def _card(remedy: Remedy) -> dict[str, Any]:
    where = remedy.worst.where
    return {
        **as_json(remedy.worst),
        "cost": cost_words(remedy.cost),
        "where": ", ".join(filter(None, (where.module, where.op, where.source))),
        "others": [finding.title for finding in remedy.findings[1:]],
        "kind": " ".join(filter(None, (remedy.worst.severity, remedy.worst.kind))),
    }


# --- data for the scripts that is not in the document ---


def _numbers(document: RunDocument) -> dict[str, Any]:
    first, run, traced = offender(document), document.run, bool(rows_of(document))
    return {
        "rank": run.rank,
        "ended": run.ended,
        "steps": run.steps,
        "skipped": lost(document),
        "seconds": run.seconds,
        "lower": in_16_bits(document) if traced else None,
        "casting": on_casts(document) if traced else None,
        "first": f"{in_words(first)} at step {first.step}" if first else None,
    }
