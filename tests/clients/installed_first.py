"""Runs every client in a process that installs precast before it imports any library, and saves what each computed.

As for a user who writes `precast.install()` in the first line: ``python -m tests.clients.installed_first FILE``.
"""

from __future__ import annotations

import sys


def main(path: str) -> None:
    import precast

    precast.install("torch")
    import torch

    torch.set_num_threads(1)  # as in the tests that compare
    from tests.clients.clients import CASES

    torch.save({name: client.run(dtype) for name, (client, dtype) in CASES.items()}, path)


if __name__ == "__main__":
    main(sys.argv[1])
