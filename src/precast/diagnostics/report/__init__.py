"""What a run leaves behind: a JSON document, and one HTML page made of it. Start with `document.py`.

Nothing in this folder loads torch: a document can be read where there is none.
"""

from precast.diagnostics.report.document import blank, load, merge, save, validate
from precast.diagnostics.report.page import html, needed, write

__all__ = ["blank", "html", "load", "merge", "needed", "save", "validate", "write"]
