"""The answer of `precast try` as one HTML file: the sentence, the table, the curves of the losses, the lines to add.

Invariants: all text of the program is escaped; the page needs no network and no script but the chart's.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from precast._internal.version import __version__
from precast.report.page import asset, needed, script_json
from precast.running.trial.answer import TryAnswer
from precast.running.trial.experiment import ExperimentResult
from precast.running.trial.terminal_answer import cells, memory_note

__all__ = ["html"]


def html(answer: TryAnswer, result: ExperimentResult, command: list[str]) -> str:
    """Return the page.

    Raises:
        MissingExtraError: jinja2 or plotly is not installed.
    """
    jinja2, plotly = needed()
    from markupsafe import Markup  # for text of precast, and JSON that `script_json` made

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = resources.files("precast.running.trial").joinpath("try.html.jinja").read_text()
    heading, *rows = cells(result) if result.base.steps else [[]]
    page: str = environment.from_string(template).render(
        command=" ".join(["precast try", *command]),
        answer=answer,
        heading=heading,
        rows=rows,
        memory=memory_note(result) if rows else "",
        withheld=result.withheld,
        version=__version__,
        style=Markup(asset("style.css")),
        data=Markup(script_json(_curves(result))),
        plotly=Markup(plotly),
    )
    return page


def _curves(result: ExperimentResult) -> list[dict[str, Any]]:
    """Return the curve of the loss of each setting's first trial."""
    settings = [each for each in [result.base, *result.settings] if each.outcomes]
    return [
        {
            "name": setting.name,
            "mode": "lines",
            "x": list(range(1, len(setting.outcomes[0].losses) + 1)),
            "y": setting.outcomes[0].losses,
        }
        for setting in settings
    ]
