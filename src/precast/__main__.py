"""`python -m precast` is `precast`: the folder that one is in takes no part in what precast imports."""

import os
import sys

if not sys.flags.safe_path:  # in place of the folder, the one that the command `precast` is in
    sys.path[0] = os.path.dirname(sys.executable)

from precast.cli.main import main  # a `click.py` in that folder is not ours

if __name__ == "__main__":
    main()
