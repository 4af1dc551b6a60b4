"""Run `precast-lint` by `python -m precast_lint`, without importing modules from the current folder."""

import os
import sys

if not sys.flags.safe_path:  # replace the current folder by that of the command
    sys.path[0] = os.path.dirname(sys.executable)

from precast_lint.cli import main  # not a `click.py` in the current folder

if __name__ == "__main__":
    main(prog_name="precast-lint")
