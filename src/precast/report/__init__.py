"""The data of traces and runs (`schema.py`), the document of a run (`document.py`), its summary, and its HTML page.

Nothing in this package loads PyTorch: a document can be read where it is not installed.
"""

from precast.report.document import blank, load, merge, save, validate
from precast.report.page import html, needed, write

__all__ = ["blank", "html", "load", "merge", "needed", "save", "validate", "write"]
