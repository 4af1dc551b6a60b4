"""Private PyTorch API, grouped by subsystem. No other package uses it; `patches` makes all patches of PyTorch.

Invariants:

- no decision about precision is made here: every name is a thin, typed wrapper of one feature of the installed
  PyTorch, so that this is the one package to check for a new version of PyTorch;
- each private name has the reason for its use. The version in brackets is one with which it was tested; without a
  version, nothing private is used;
- the installed version is checked before anything else is imported;
- this package exports the names in the `__all__` of its files.
"""

from __future__ import annotations

from precast._torch.version import VERSION as VERSION

# isort: split

from precast._torch.amp import *
from precast._torch.autograd import *
from precast._torch.compile import *
from precast._torch.compiler_patches import *
from precast._torch.devices import *
from precast._torch.dispatcher import *
from precast._torch.distributed import *
from precast._torch.float8 import *
from precast._torch.graphs import *
from precast._torch.memory import *
from precast._torch.modes import *
from precast._torch.modules import *
from precast._torch.optimizers import *
from precast._torch.packages import *
from precast._torch.patch_list import *
from precast._torch.patches import *
from precast._torch.tensors import *
from precast._torch.threads import *
from precast._torch.transforms import *
from precast._torch.trial_patches import *
from precast._torch.undispatched_calls import *
