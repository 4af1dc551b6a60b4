"""What MkDocs calls (`hooks` in mkdocs.yml): before it reads the pages, they are made.

Invariant: MkDocs builds once for each language; pages are made once for all of them.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

from tools.site.directives import PageError
from tools.site.pages import Site

__all__ = ["on_pre_build"]


def on_pre_build(config: MkDocsConfig) -> None:
    """Makes the folder `docs_dir` from the project's `docs/`.

    Raises:
        PluginError: a page asks for something that is not there, or that failed.
    """
    root = Path(config.config_file_path).parent
    try:
        Site(root, root / "build" / "site-cache").write(Path(config.docs_dir))
    except PageError as problem:
        raise PluginError(f"The pages cannot be made:\n{problem}") from problem
