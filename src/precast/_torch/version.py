"""The version of the installed PyTorch, checked before newer features are used."""

from __future__ import annotations

from typing import Final

import torch

from precast._internal import torch_versions

__all__ = ["VERSION"]

VERSION: Final = torch_versions.check(torch.__version__)
"""Major and minor version of the installed PyTorch."""
