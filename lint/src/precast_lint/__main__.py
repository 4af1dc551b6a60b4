"""`python -m precast_lint` is `precast-lint`: the folder that one is in takes no part in what the checker imports."""

import os
import sys

if not sys.flags.safe_path:  # in place of the folder, the one that the command is in
    sys.path[0] = os.path.dirname(sys.executable)

from precast_lint.cli import main  # a `click.py` in that folder is not ours

if __name__ == "__main__":
    main(prog_name="precast-lint")
