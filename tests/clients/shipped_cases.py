"""Models that are shipped in every way, and the calls that are compared.

Other people's models are those of the clients' tests; the libraries are those of the extra `test-clients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import networks
from benchmarks.client_models import MODELS, SIZES
from precast.policy.module_names import name_of_each
from precast.policy.policy import Policy

__all__ = ["CASES", "POLICIES", "Case", "Shipped"]

_SIZE = SIZES["tiny"]
Call = Callable[[Any], Any]


@dataclass(frozen=True)
class Shipped:
    """A model that is ready, and its calls.

    Attributes:
        model: the float32 model, in evaluation mode, with frozen parameters.
        example: the arguments of a call: a tuple, or a dict of keyword arguments.
        call: all that is compared: calls a model, and returns what it computes.
    """

    model: nn.Module
    example: Any
    call: Call


@dataclass(frozen=True)
class Case:
    """One model; `make` gives it the same numbers each time.

    Attributes:
        name: what the table calls it.
        library: whose model it is.
        build: makes it.
        graph: makes a module that does all its calls in one, which a graph can be recorded of; `build` where there is
            one call anyway, None where no graph has them all.
    """

    name: str
    library: str
    build: Callable[[], Shipped]
    graph: Callable[[], Shipped] | None

    def make(self) -> Shipped:
        """The model and its calls, from the same random numbers each time."""
        return self._made(self.build)

    def make_graph(self) -> Shipped | None:
        """The same as one call."""
        return None if self.graph is None else self._made(self.graph)

    @staticmethod
    def _made(build: Callable[[], Shipped]) -> Shipped:
        torch.manual_seed(0)
        shipped = build()
        for parameter in shipped.model.eval().parameters():
            parameter.requires_grad_(False)
        return shipped


def _calls(example: Any) -> Call:
    if isinstance(example, dict):
        return lambda model: model(**example)
    return lambda model: model(*example)


def _client(name: str) -> Shipped:
    model, batch = MODELS[name].make(_SIZE), MODELS[name].batch(_SIZE)
    example: Any = dict(batch)
    if name == "UNet":
        example = batch["sample"], batch["timestep"]
    elif name == "UNet of volumes":
        example = (batch["volume"],)
    elif name == "GAT":
        example = batch["features"], batch["edges"]
    elif name in ("GPT-2", "Llama", "T5", "Whisper"):
        example["use_cache"] = False
    return Shipped(model, example, _calls(example))


def _prompted(model: Any, tokens: Tensor) -> list[Any]:
    """A prompt, and two tokens more from the cache that the model made."""
    first = model(input_ids=tokens[:, :6], use_cache=True)
    results = [first.logits]
    cache = first.past_key_values
    for place in (6, 7):
        later = model(input_ids=tokens[:, place : place + 1], past_key_values=cache)
        cache = later.past_key_values
        results.append(later.logits)
    return results


class _Prompted(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> list[Any]:
        return _prompted(self.model, tokens)


def _with_cache(name: str) -> Shipped:
    model, batch = MODELS[name].make(_SIZE), MODELS[name].batch(_SIZE)
    tokens = batch["input_ids"]
    example = {"input_ids": tokens[:, :6], "use_cache": True}
    return Shipped(model, example, lambda model: _prompted(model, tokens))


def _with_cache_in_one(name: str) -> Shipped:
    example = (MODELS[name].batch(_SIZE)["input_ids"],)
    return Shipped(_Prompted(MODELS[name].make(_SIZE)), example, _calls(example))


def _generation(name: str) -> Shipped:
    model, batch = MODELS[name].make(_SIZE), MODELS[name].batch(_SIZE)
    generate: Any = MODELS[name].generate

    def call(model: Any) -> Tensor:
        torch.manual_seed(1)
        tokens: Tensor = generate(model, batch)
        return tokens

    return Shipped(model, dict(batch), call)


def _demo(task: str, *, scripted: bool = False) -> Shipped:
    script = torch.jit.script if scripted else lambda model: model
    with mock.patch("torch.jit.script", script):
        network = getattr(networks, task)(torch.device("cpu"))
        model, [(inputs, _)] = network.seeded(torch.device("cpu"), 1)
    return Shipped(model, (inputs,), _calls((inputs,)))


def _recurrent(kind: Callable[..., nn.Module]) -> Shipped:
    example = (torch.randn(4, 7, 16),)
    return Shipped(kind(16, 24, num_layers=2, batch_first=True), example, _calls(example))


class _Attends(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=batch_first)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        itself = self.attention(x, x, x)[0]
        head: Tensor = self.head(itself + self.attention(x, memory, memory)[0])
        return head


def _attention(*, batch_first: bool) -> Shipped:
    example = torch.randn(3, 5, 32), torch.randn(3, 5, 32)
    return Shipped(_Attends(batch_first), example, _calls(example))


def _single(name: str, library: str, build: Callable[[], Shipped]) -> Case:
    return Case(name, library, build, build)


def _cases() -> Iterator[Case]:
    for name in (
        "BERT",
        "GPT-2",
        "Llama",
        "ViT",
        "T5",
        "Whisper",
        "UNet",
        "GAT",
        "UNet of volumes",
    ):
        yield _single(name, MODELS[name].library, partial(_client, name))
    for name in ("GPT-2", "Llama"):
        in_one = partial(_with_cache_in_one, name)
        yield Case(f"{name}, with cache", "transformers", partial(_with_cache, name), in_one)
    for name in ("GPT-2", "Llama", "T5", "Whisper"):
        yield Case(f"{name}, generate", "transformers", partial(_generation, name), None)
    for task in ("checkerboard", "digits"):
        yield _single(f"{task} network", "precast", partial(_demo, task))
    scripted = partial(_demo, "checkerboard", scripted=True)
    yield _single("checkerboard network, scripted", "precast", scripted)
    yield _single("LSTM", "torch", partial(_recurrent, nn.LSTM))
    yield _single("GRU", "torch", partial(_recurrent, nn.GRU))
    yield _single("MultiheadAttention", "torch", partial(_attention, batch_first=False))
    yield _single("MultiheadAttention, fused", "torch", partial(_attention, batch_first=True))


CASES = {case.name: case for case in _cases()}
"""The shipped models by name."""


def _by_module(model: nn.Module, dtype: torch.dtype) -> Policy:
    """`default` with a rule of each kind, for modules in the beginning, in the middle and at the end."""
    names = [
        n for n, m in name_of_each(model) if n and any(True for _ in m.parameters(recurse=False))
    ]
    if len(names) < 3:  # a module of PyTorch's alone
        return Policy.load("default").replace(
            name="module rules", modules={"": {"ops": {"linear": "fp32"}}}
        )
    other = "float16" if dtype is torch.bfloat16 else "bfloat16"
    middle = names[len(names) // 2]
    rules = {names[0]: "fp32", middle: {"ops": {"linear": "fp32"}}, names[-1]: other}
    return Policy.load("default").replace(name="module rules", modules=rules)


POLICIES: dict[str, Callable[[nn.Module, torch.dtype], Policy]] = {
    "torch": lambda *_: Policy.load("torch"),
    "default": lambda *_: Policy.load("default"),
    "lean": lambda *_: Policy.load("lean"),
    "module rules": _by_module,
}
"""The policies, each made for a model and a dtype."""
