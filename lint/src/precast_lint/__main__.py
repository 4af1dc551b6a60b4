"""Run `precast-lint` by `python -m precast_lint`, without importing modules from the current folder."""

import os
import sys

if not sys.flags.safe_path:  # `python -m` puts the current folder first
    sys.path[0] = os.path.dirname(sys.executable)

from precast_lint.cli import main  # imports click, so only now

if __name__ == "__main__":
    main(prog_name="precast-lint")
