"""Cases of scalers that another object of the file has: a plugin, a callable scaler, a dataclass."""

from __future__ import annotations

from precast_lint.model import Case

__all__ = [
    "CLIP_INVALID",
    "CLIP_VALID",
    "PLAIN_INVALID",
    "SAVE_INVALID",
    "STEP_INVALID",
    "UPDATE_INVALID",
]

_PLUGIN = """
import torch

class Precision:
    def __init__(self, limit):
        self.limit = limit
        self.scaler = torch.amp.GradScaler("cuda")

    def scaled(self, loss):
        return self.scaler.scale(loss)

    def clip(self, optimizer, parameters):
        self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, self.limit)

    def step(self, optimizer):
        self.scaler.step(optimizer)
        self.scaler.update()

class Loop:
    def __init__(self, model, precision: Precision):
        self.model = model
        self.precision = precision
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(self, batches):
        for batch in batches:
            self.optimizer.zero_grad()
            self.precision.scaled(self.model(batch)).backward()
            self.precision.clip(self.optimizer, self.model.parameters())
            self.precision.step(self.optimizer)
"""

_CALLABLE = """
import torch

class Scaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda")

    def __call__(self, loss, optimizer, parameters, limit=None):
        self._scaler.scale(loss).backward()
        if limit is not None:
            self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        self._scaler.step(optimizer)
        self._scaler.update()

def train(model, batches, optimizer, loss_scaler: Scaler):
    for batch in batches:
        optimizer.zero_grad()
        loss_scaler(model(batch), optimizer, model.parameters(), 1.0)
"""

_STATE = """
import dataclasses

import torch

@dataclasses.dataclass
class State:
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

    def save(self, path):
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
            },
            path,
        )

def step(state: State, batch):
    state.optimizer.zero_grad()
    state.scaler.scale(state.model(batch)).backward()
    state.scaler.unscale_(state.optimizer)
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    state.scaler.step(state.optimizer)
    state.scaler.update()

def fit(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State(model, optimizer, torch.amp.GradScaler("cuda"))
    for batch in batches:
        step(state, batch)
    state.save("last.pt")
"""


def _without(code: str, *lines: str) -> str:
    """A program without the lines that begin with certain texts."""
    kept = [line for line in code.split("\n") if not line.strip().startswith(lines)]
    return "\n".join(kept)


_BARE = _without(_STATE, "state.scaler.unscale_", "torch.nn.utils")

CLIP_VALID = (
    Case(_PLUGIN),
    Case(_CALLABLE),
    Case(_STATE),
    Case(
        """
        import torch

        class Learner:
            def __init__(self, model, callbacks):
                self.model = model
                self.callbacks = callbacks
                self.scaler = torch.amp.GradScaler("cuda")
                self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(self, loss):
                self.scaler.scale(loss).backward()
                for callback in self.callbacks:
                    callback.before_step(self)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
        """,
        note="A callback may have unscaled the gradients.",
    ),
)
CLIP_INVALID = (
    Case(_without(_PLUGIN, "self.scaler.unscale_"), count=1, note="A plugin has the scaler."),
    Case(
        _PLUGIN.replace(
            "self.precision.clip(self.optimizer, self.model.parameters())",
            "torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)",
        ),
        count=1,
    ),
    Case(_without(_CALLABLE, "self._scaler.unscale_"), _CALLABLE, unsafe=True),
    Case(_without(_STATE, "state.scaler.unscale_"), _STATE, unsafe=True),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        one = torch.optim.SGD(encoder.parameters(), lr=0.1)
        two = torch.optim.SGD(decoder.parameters(), lr=0.1)
        for batch in batches:
            scaler.scale(decoder(encoder(batch))).backward()
            scaler.unscale_(one)
            torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
            scaler.step(one)
            scaler.step(two)
            scaler.update()
        """,
        count=1,
        note="The gradients of another optimizer were unscaled.",
    ),
    Case(
        """
        try:
            from torch.amp import GradScaler
            NEW = True
        except ImportError:
            from torch.cuda.amp import GradScaler
            NEW = False
        from torch.nn.utils import clip_grads_with_norm_, get_total_norm

        scaler = GradScaler()
        for batch in batches:
            scaler.scale(model(batch)).backward()
            norm = get_total_norm([p.grad for p in model.parameters()])
            clip_grads_with_norm_(model.parameters(), 1.0, norm)
            scaler.step(optimizer)
            scaler.update()
        """,
        """
        try:
            from torch.amp import GradScaler
            NEW = True
        except ImportError:
            from torch.cuda.amp import GradScaler
            NEW = False
        from torch.nn.utils import clip_grads_with_norm_, get_total_norm

        scaler = GradScaler()
        for batch in batches:
            scaler.scale(model(batch)).backward()
            scaler.unscale_(optimizer)
            norm = get_total_norm([p.grad for p in model.parameters()])
            clip_grads_with_norm_(model.parameters(), 1.0, norm)
            scaler.step(optimizer)
            scaler.update()
        """,
        unsafe=True,
        note="The scaler has two names, and the norm is that of a list of gradients.",
    ),
)
UPDATE_INVALID = (
    Case(_without(_PLUGIN, "self.scaler.update"), _PLUGIN, unsafe=True),
    Case(_without(_CALLABLE, "self._scaler.update"), _CALLABLE, unsafe=True),
    Case(_without(_STATE, "state.scaler.update"), _STATE, unsafe=True),
)
STEP_INVALID = (
    Case(
        _PLUGIN.replace("self.precision.step(self.optimizer)", "self.optimizer.step()"),
        count=1,
        note="The gradients were unscaled in the method of another object.",
    ),
    Case(
        _BARE.replace("state.scaler.step(state.optimizer)", "state.optimizer.step()"),
        _BARE,
        unsafe=True,
    ),
)
PLAIN_INVALID = (
    Case(_PLUGIN.replace("self.precision.scaled(self.model(batch))", "self.model(batch)"), count=1),
    Case(_CALLABLE.replace("self._scaler.scale(loss)", "loss"), _CALLABLE, unsafe=True),
    Case(
        """
        import torch

        def train(G, D, g, d, scaler_g, scaler_d, x):
            scaler_d.scale(D(x).mean()).backward()
            scaler_d.step(d)
            scaler_d.update()
            loss = -D(G(x)).mean()
            loss.backward()
            scaler_g.unscale_(g)
            scaler_g.step(g)
            scaler_g.update()
        """,
        count=1,
        note="What another scaler scaled are gradients of another optimizer.",
    ),
)
SAVE_INVALID = (
    Case(_without(_STATE, '"scaler": self.scaler'), count=1),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, batch):
                self.scaler.scale(self.model(batch)).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()

            def save(self, folder):
                torch.save(self.model.state_dict(), folder / "model.pt")
                torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        """,
        count=1,
        note="Each state has a file of its own.",
    ),
)
