"""Makes one HTML file of the comparison that needs no other file, no network and no script, and has a dark style."""

from __future__ import annotations

import base64
from importlib import resources

from precast._internal import version
from precast.demo.compare import Comparison
from precast.demo.findings import caption, machine, reasons, rows, title
from precast.demo.picture import curves_png, panel_png

__all__ = ["page_html"]


def page_html(comparison: Comparison) -> str:
    """The page; all pictures are inside it."""
    import jinja2

    source = resources.files("precast.demo").joinpath("page.html.jinja").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["uri"] = _uri
    return environment.from_string(source).render(
        settings=comparison.settings,
        title=title(comparison),
        machine=machine(comparison),
        mixed=comparison.mixed.name,
        rows=rows(comparison),
        reasons=reasons(comparison),
        panels=[(caption(comparison, panel), panel_png(panel)) for panel in comparison.panels],
        curves=[
            (f"{what} by step", *(curves_png(comparison, what, s) for s in ("light", "dark")))
            for what in (("loss", "scale") if comparison.mixed.scales else ("loss",))
        ],
        marked=any(panel.marks for panel in comparison.panels),  # words: large, also on a phone
        version=version.__version__,
    )


def _uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
