"""A function that calls functions on many paths is given up in time, and nothing is said of it.

What a called function asks without doing anything to the step makes no more paths.
"""

from __future__ import annotations

import time

from precast_lint.checking.engine import check
from precast_lint.parsing.text import decode
from precast_lint.selecting.settings import LintSettings

TESTS = "\n".join(f"        if self.flag{i}:\n            x = self.f{i}(x)" for i in range(12))
LAYER = "    def layer{i}(self, x):\n" + TESTS + "\n        return {call}\n"
PROGRAM = (
    "import torch\n\nclass Trainer:\n"
    '    def __init__(self):\n        self.scaler = torch.amp.GradScaler("cuda")\n\n'
    "    def train(self, x):\n        self.scaler.scale(self.layer0(x)).backward()\n"
    "        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)\n"
    "        self.scaler.step(self.optimizer)\n        self.scaler.update()\n\n"
    + LAYER.format(i=0, call=" + ".join(["self.layer1(x)"] * 8))
    + LAYER.format(i=1, call=" + ".join(["self.layer2(x)"] * 8))
    + LAYER.format(i=2, call="x")
)


def test_a_function_of_very_many_paths_takes_seconds_at_most() -> None:
    start = time.process_time()
    check(decode(PROGRAM.encode()), "example.py", LintSettings(codes=frozenset({"AMP203"})))
    assert time.process_time() - start < 30  # without a bound: more than a minute


ASKS = "\n".join(f"        if self.flag{i}:\n            print({i})" for i in range(6))
LONG = (
    "import torch\n\nclass Trainer:\n"
    '    def __init__(self):\n        self.scaler = torch.amp.GradScaler("cuda")\n\n'
    "    def train(self, batches):\n        for batch in batches:\n"
    "            self.report()\n            self.save()\n"
    "            self.scaler.scale(self.model(batch)).backward()\n"
    "            if self.clips:\n"
    "                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)\n"
    "            self.scaler.step(self.optimizer)\n            self.scaler.update()\n"
    "            self.report()\n            self.save()\n\n"
    f"    def report(self):\n{ASKS}\n\n    def save(self):\n{ASKS.replace('flag', 'mark')}\n"
)


def test_a_trainer_that_logs_and_saves_is_followed_through_both() -> None:
    result = check(decode(LONG.encode()), "example.py", LintSettings(codes=frozenset({"AMP203"})))
    assert [finding.code for finding in result.findings] == ["AMP203"]
