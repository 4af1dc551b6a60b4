"""The installed PyTorch, checked before anything of it is used that older ones do not have."""

from __future__ import annotations

from typing import Final

import torch

from precast._internal import torch_versions

__all__ = ["VERSION"]

VERSION: Final = torch_versions.check(torch.__version__)
"""Major and minor number of the installed PyTorch."""
