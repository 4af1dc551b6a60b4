from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.support.trials import trial_server


@pytest.fixture(scope="package")
def server() -> Iterator[subprocess.Popen[str]]:
    with trial_server() as process:
        yield process
