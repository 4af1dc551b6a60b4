"""Private PyTorch API, by subsystem: the only package that touches it; `patches` makes every patch of PyTorch.

Invariants:

- nothing here decides anything about precision: every name is a thin, typed wrapper of one feature of the installed
  PyTorch, so that for a new version of PyTorch there is one package to read;
- each use of a private name says why it is needed; the version in brackets is one in which it was seen to work. Where
  no version is given, nothing private is used;
- the installed version is checked before anything else is loaded;
- the names of this package are those that its files list in `__all__`.
"""

from __future__ import annotations

from precast._torch.version import VERSION as VERSION

# isort: split

from precast._torch.amp import *
from precast._torch.autograd import *
from precast._torch.compile import *
from precast._torch.compiled_kernels import *
from precast._torch.compiler_patches import *
from precast._torch.devices import *
from precast._torch.dispatcher import *
from precast._torch.distributed import *
from precast._torch.float8 import *
from precast._torch.graphs import *
from precast._torch.modes import *
from precast._torch.modules import *
from precast._torch.optimizers import *
from precast._torch.packages import *
from precast._torch.patch_list import *
from precast._torch.patches import *
from precast._torch.tensors import *
from precast._torch.threads import *
from precast._torch.transforms import *
