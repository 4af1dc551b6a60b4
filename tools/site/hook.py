"""Hooks of MkDocs (`hooks` in mkdocs.yml): before it reads the pages, they are made.

Invariant: MkDocs builds once for each language; pages are made once for all of them.
"""

from __future__ import annotations

import logging
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

from tools.site.pages import Site

__all__ = ["on_pre_build"]

_LOG = logging.getLogger("mkdocs.hooks.pages")


def on_pre_build(config: MkDocsConfig) -> None:
    """Makes the folder `docs_dir` from the project's `docs/`.

    Raises:
        PluginError: a page asks for something that is not there, or that failed, and the build is strict.
    """
    root = Path(config.config_file_path).parent
    problems = Site(root, root / "build" / "site-cache").write(Path(config.docs_dir))
    for problem in problems:
        _LOG.warning(problem)
    if problems and config.strict:
        raise PluginError(f"{len(problems)} things are wrong with the pages")
