"""The answer of `precast try` as one HTML file: the sentence, the table, the curves of the losses, the lines to add.

Invariants: all text of the program is escaped; the answer and the table are readable without a script.
"""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

from precast._internal.version import __version__
from precast.report.page import page_of
from precast.running.trial.answer import TryAnswer
from precast.running.trial.experiment import ExperimentResult
from precast.running.trial.terminal_answer import cells, memory_note

__all__ = ["html"]

_CHART: Final = """
{
  const losses = document.getElementById("losses");
  const curves = JSON.parse(document.getElementById("data").textContent);
  const clear = "rgba(0,0,0,0)";
  const layout = {margin: {t: 10}, paper_bgcolor: clear, plot_bgcolor: clear, xaxis: {title: {text: "step"}}};
  if (losses) Plotly.newPlot(losses, curves, layout, {displayModeBar: false, responsive: true});
  document.documentElement.dataset.ready = "true";
}
"""
_STYLE: Final = """
main { max-width: 62rem; margin: 0 auto; padding: 1rem; }
main td, main th { text-align: left; padding: .3rem 1rem .3rem 0; }
main h1 { margin-bottom: 1rem; }
main table { display: block; overflow-x: auto; }
#losses { height: 20rem; }
"""


def html(answer: TryAnswer, result: ExperimentResult, command: list[str]) -> str:
    """Return the page.

    Raises:
        MissingExtraError: jinja2 or plotly is not installed.
    """
    template = resources.files("precast.running.trial").joinpath("try.html.jinja").read_text()
    heading, *rows = cells(result) if result.base.steps else [[]]
    return page_of(
        template,
        _curves(result),
        script=_CHART,
        style=_STYLE,
        title=" ".join(["precast try", *command]),
        version=__version__,
        answer=answer,
        heading=heading,
        rows=rows,
        memory=memory_note(result) if rows else "",
        withheld=result.withheld,
    )


def _curves(result: ExperimentResult) -> list[dict[str, Any]]:
    """Return the curve of the loss of each setting's first trial."""
    return [
        {"name": each.name, "mode": "lines", "x0": 1, "y": each.outcomes[0].losses}
        for each in [result.base, *result.settings]
        if each.outcomes
    ]
