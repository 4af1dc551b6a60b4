"""All that is seen of a program, from the moment it has PyTorch to its end.

Invariants: it changes no number that the program computes; what is kept does not grow with the run; a process that is
forked off is not watched.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import torch
from torch import nn

from precast.events import StepEvent, observe
from precast.installation import install
from precast.policy import Policy
from precast.running.steps import Steps

__all__ = ["Watch"]


class Watch:
    """Puts precast behind the program's regions, and looks on.

    Args:
        policy: the name of a preset, or the path of a policy file.

    Raises:
        PolicyError: the policy cannot be read.
    """

    def __init__(self, policy: str) -> None:
        self.policy = Policy.load(policy)
        self.steps = Steps(self._begins, self._called)
        self._ends = ExitStack()

    def start(self) -> None:
        """Begins to watch."""
        install(self.policy)
        self._ends.enter_context(observe(self._hear))
        self.steps.start()
        self._ends.callback(self.steps.stop)
        os.register_at_fork(after_in_child=self.stop)

    def stop(self) -> None:
        """Ends it; the policy stays in force, for what the program does at its exit."""
        self._ends.close()

    # --- what was seen ---

    def devices(self) -> list[str]:
        """The device types that were computed on."""
        return ["cpu", *(["cuda"] if torch.cuda.is_initialized() else [])]

    # --- what is heard ---

    def _hear(self, event: object) -> None:
        if isinstance(event, StepEvent):
            self.steps.scaled(event)

    def _begins(self, step: int) -> None:
        pass

    def _called(self, module: nn.Module) -> None:
        pass
