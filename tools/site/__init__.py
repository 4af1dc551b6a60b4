"""The documentation site, as it is built from `docs/`; start with `pages.py`.

- `directives.py` finds what a page asks to be put in: `<!-- output: 01_gradients.py -->`.
- `programs.py` runs the programs, by `apart.py`; `pictures.py` and `drawings.py` draw; `tables.py` shows policies.
- `links.py` turns links that leave `docs/` into links to pages of the site.
- `pages.py` makes the folder that MkDocs reads; `hook.py` is what MkDocs calls.
- `check.py` looks at the site that was built.
"""
