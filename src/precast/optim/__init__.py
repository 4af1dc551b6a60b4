"""Training of models whose weights are stored in bfloat16, without float32 master weights.

import precast.optim

handle = precast.optim.bfloat16_weights(model, optimizer, masters="kahan")
"""

from precast.optim.masters import Bfloat16Weights, bfloat16_weights

__all__ = ["Bfloat16Weights", "bfloat16_weights"]
