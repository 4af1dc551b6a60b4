"""Two runs of a small decoder, recorded and compared: compiled, another PyTorch, two processes, and served."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import precast

WORDS, WIDTH, HEADS, LENGTH, ROWS = 64, 64, 4, 16, 8


class Block(nn.Module):
    """Attention and a perceptron, each beside a connection around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states of the same shape, (rows, tokens, width)."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed: Tensor = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class Decoder(nn.Module):
    """Predicts the next of some tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (rows, tokens, words)."""
        logits: Tensor = self.head(self.blocks(self.embed(tokens)))
        return logits


def model_and_tokens() -> tuple[Decoder, Tensor]:
    """Return the same model and the same tokens in each process."""
    torch.manual_seed(0)
    return Decoder(), torch.randint(0, WORDS, (ROWS, LENGTH + 1))


def step(model: Callable[[Tensor], Tensor], tokens: Tensor) -> None:
    """Compute the gradients of one batch."""
    logits = model(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()


def compiled(folder: Path) -> precast.RunDifference:
    """Compare a model with the same one under `torch.compile`: at the results of the model, and at gradients."""
    for name in ("eager.run", "compiled.run"):
        model, tokens = model_and_tokens()
        run = torch.compile(model) if name == "compiled.run" else model
        with precast.record(folder / name, model):
            step(run, tokens)
    return precast.compare(folder / "eager.run", folder / "compiled.run", bound=1e-4)


def upgraded(folder: Path) -> precast.RunDifference:
    """Compare the files of two versions of PyTorch. The older one is imitated: another kernel, and other names."""
    for name in ("old.run", "new.run"):
        model, tokens = model_and_tokens()
        backend = SDPBackend.MATH if name == "old.run" else SDPBackend.FLASH_ATTENTION
        with sdpa_kernel(backend), precast.record(folder / name, model):
            step(model, tokens)
    head, _, rest = (folder / "old.run").read_bytes().partition(b"\n")
    header = json.loads(head) | {"torch": "2.12.1"}
    rest = rest.replace(b'"add.Tensor"', b'"add_.Tensor"').replace(b'"mm"', b'"mm.old"')
    (folder / "old.run").write_bytes(json.dumps(header).encode() + b"\n" + rest)
    return precast.compare(folder / "old.run", folder / "new.run", bound=1e-4)


def two_processes(folder: Path) -> precast.RunDifference:
    """Compare one process with two that share each batch. `split=2` measures the halves of a batch."""
    train(0, 1, folder / "one.run")
    command = [sys.executable, __file__, "2", str(folder / "two.run")]
    processes = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    assert [each.wait() for each in processes] == [0, 0]
    return precast.compare(folder / "one.run", folder / "two.run", bound=1e-4)


def train(rank: int, ranks: int, path: Path) -> None:
    """Train on this process's part of the batch; gradients are averaged over the processes."""
    torch.set_num_threads(1)
    model, tokens = model_and_tokens()
    if ranks > 1:
        meeting = f"file://{path}.meeting"
        torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=ranks)
    wrapped = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with precast.record(path, model, split=2 // ranks):
        for _ in range(2):
            step(wrapped, tokens.chunk(ranks)[rank])
            optimizer.step()
            optimizer.zero_grad()
    if ranks > 1:
        torch.distributed.destroy_process_group()


def served(_folder: Path, form: Any = "converted") -> precast.RunDifference:
    """Compare the trainer's region on a batch with the converted or exported model on its samples, one by one."""
    model, tokens = model_and_tokens()
    trainer = precast.Setting("default", torch.bfloat16)
    server = precast.Setting("default", torch.bfloat16, form, split=ROWS)
    return precast.compare_settings(model.eval(), tokens, a=trainer, b=server, bound=1e-2)


COMPARISONS: dict[str, Callable[[Path], precast.RunDifference]] = {
    "eager and compiled": compiled,
    "PyTorch 2.12 and 2.13": upgraded,
    "one process and two": two_processes,
    "trainer and server, converted": served,
    "trainer and server, exported": lambda folder: served(folder, "exported"),
}

if __name__ == "__main__" and len(sys.argv) == 4:
    train(int(sys.argv[3]), int(sys.argv[1]), Path(sys.argv[2]))
elif __name__ == "__main__":
    for title, comparison in COMPARISONS.items():
        with tempfile.TemporaryDirectory() as name:
            print(f"{title}\n{comparison(Path(name))}".replace(name, "."), end="\n\n")
