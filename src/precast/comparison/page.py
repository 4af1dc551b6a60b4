"""The comparison of two runs as one HTML file: the cause, the difference along the modules, and the steps.

Invariants: all text of the program is escaped; the cause and the tables are readable without a script.
"""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

from precast._internal.version import __version__
from precast.report.page import page_of

__all__ = ["html"]

_CHART: Final = """
  const charts = JSON.parse(document.getElementById("data").textContent);
  const clear = "rgba(0,0,0,0)";
  for (const [id, curves, title] of charts) {
    const layout = {margin: {t: 10, b: 110}, paper_bgcolor: clear, plot_bgcolor: clear,
      xaxis: {title: {text: title}, type: id === "growth" ? "category" : "linear", automargin: true},
      yaxis: {type: "log", title: {text: "relative distance"}, exponentformat: "power"}};
    Plotly.newPlot(id, curves, layout, {displayModeBar: false, responsive: true});
  }
  document.documentElement.dataset.ready = "true";
"""
_STYLE: Final = """
main { max-width: 62rem; margin: 0 auto; padding: 1rem; }
main td, main th { text-align: left; padding: .3rem 1rem .3rem 0; }
#growth, #steps { height: 24rem; }
"""
_CURVES: Final = ("output", "loss", "gradients", "weights")


def html(difference: Any) -> str:
    """Return the page of a `RunDifference`.

    Raises:
        MissingExtraError: jinja2 or plotly is not installed.
    """
    plain = difference.to_dict()
    growth, steps = plain["growth"], plain["steps"]
    names = [f"{number}. {each['module'] or 'the model'}" for number, each in enumerate(growth, 1)]
    along = {
        "x": names,
        "y": [each["distance"] or None for each in growth],
        "mode": "lines+markers",
    }
    curves = [
        {"name": name, "x": [e["step"] for e in steps], "y": [e[name] or None for e in steps]}
        for name in _CURVES
    ]
    template = resources.files(__package__).joinpath("compare.html.jinja").read_text("utf-8")
    return page_of(
        template,
        [
            ["growth", [along], "results of modules, in the order of the program"],
            ["steps", curves, "step"],
        ],
        script=_CHART,
        style=_STYLE,
        title=f"precast compare {difference.a} {difference.b}",
        version=__version__,
        difference=difference,
    )
