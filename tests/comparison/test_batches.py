"""Runs of a batch and of its parts, and the probabilities of tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast.errors import ComparisonError

ROWS, TOKENS, WORDS = 8, 6, 50


class Language(nn.Module):
    """A language model whose parts have what splits badly: a mask, and a mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, 32), nn.LayerNorm(32)
        self.mix, self.head = nn.Linear(32, 32), nn.Linear(32, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = torch.ones(tokens.shape[1], tokens.shape[1]).tril()
        x = x + mask @ self.mix(self.norm(x))
        self.mean = x.mean((0, 1))  # differs with the batch, and does not count
        return self.head(x)


@pytest.fixture
def model() -> Language:
    return Language().eval()


def _tokens() -> Tensor:
    return torch.randint(0, WORDS, (ROWS, TOKENS))


def _record(path: Path, model: nn.Module, batches: tuple[Tensor, ...], **options: object) -> None:
    with torch.no_grad(), precast.record(path, model, **options):  # type: ignore[arg-type]
        for batch in batches:
            model(batch)


def test_a_batch_is_compared_with_its_samples(model: Language, tmp_path: Path) -> None:
    tokens = _tokens()
    _record(tmp_path / "whole.run", model, (tokens,), split=ROWS)
    _record(tmp_path / "parts.run", model, tokens.split(1))
    difference = precast.compare(tmp_path / "whole.run", tmp_path / "parts.run", bound=1e-5)
    assert difference.within_bound
    assert difference.cause is None or difference.cause.kind == "order", difference
    assert difference.steps[0].output is not None

    other = tokens.clone()
    other[5, 2] = (other[5, 2] + 1) % WORDS
    _record(tmp_path / "other.run", model, other.split(1))
    cause = precast.compare(tmp_path / "whole.run", tmp_path / "other.run").cause
    assert cause is not None
    assert cause.kind == "input"

    model.norm.eps = 1e-2
    _record(tmp_path / "eps.run", model, tokens.split(1))
    for names in (("whole", "eps"), ("eps", "whole")):
        cause = precast.compare(*(tmp_path / f"{name}.run" for name in names)).cause
        assert cause is not None
        assert (cause.kind, cause.module) == ("operation", "norm")
        assert "eps=" in cause.difference


def test_distances_of_parts_are_those_of_the_batch(model: Language, tmp_path: Path) -> None:
    tokens = _tokens()
    _record(tmp_path / "whole.run", model, (tokens,), split=ROWS)
    with torch.no_grad():
        right = model(tokens)
        with precast.autocast("cpu", torch.bfloat16):
            _record(tmp_path / "parts.run", model, tokens.split(1))
            other = torch.cat([model(each) for each in tokens.split(1)])
    difference = precast.compare(tmp_path / "whole.run", tmp_path / "parts.run")
    true = float((right - other).norm() / right.norm())
    assert difference.steps[0].output == pytest.approx(true, rel=0.4)


def _train(path: Path, parts: int, *, eps: float = 1e-5, **options: Any) -> Path:
    """Train on a batch, or on parts of it whose gradients are accumulated and clipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32, eps), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs, labels = torch.randn(ROWS, 16), torch.randn(ROWS, 4)
    with precast.record(path, model, **options):
        for _ in range(2):
            for each, label in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
                (nn.functional.mse_loss(model(each), label) / parts).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("level", ["operations", "modules"])
def test_a_batch_is_compared_with_parts_that_accumulate_gradients(
    level: str, tmp_path: Path
) -> None:
    whole = _train(tmp_path / "whole.run", 1, split=4, level=level)
    difference = precast.compare(whole, _train(tmp_path / "parts.run", 4, level=level), bound=1e-4)
    assert difference.within_bound, difference
    assert difference.cause is None or difference.cause.kind == "order", difference
    assert len(difference.steps) == 2
    for each in difference.steps:
        assert None not in (each.output, each.gradients, each.weights)
        assert each.gradients is not None
        assert each.gradients < 1e-4
    cause = precast.compare(whole, _train(tmp_path / "eps.run", 4, level=level, eps=1e-2)).cause
    assert cause is not None
    assert cause.module == "1"
    with pytest.raises(ComparisonError, match=r"has 2 backward passes, .* split=2"):
        precast.compare(whole, _train(tmp_path / "two.run", 2))
    unsplit = precast.compare(_train(tmp_path / "unsplit.run", 1), tmp_path / "parts.run")
    assert any("record the other one with split=4" in note for note in unsplit.notes)


def test_runs_that_recorded_other_steps_are_compared_in_those_of_both(tmp_path: Path) -> None:
    every = _train(tmp_path / "every.run", 1)
    second = _train(tmp_path / "second.run", 1, steps=(1, 2), eps=1e-2)
    difference = precast.compare(every, second)
    assert [each.step for each in difference.steps] == [1]
    assert any("only steps of both" in note for note in difference.notes)
    assert difference.cause is not None


def test_batches_that_were_not_split_alike_are_refused(model: Language, tmp_path: Path) -> None:
    for name, split in (("a", 2), ("b", 4)):
        _record(tmp_path / f"{name}.run", model, (_tokens()[: 2 * split],), split=split)
    with pytest.raises(ComparisonError, match="into 2 parts and into 4"):
        precast.compare(tmp_path / "a.run", tmp_path / "b.run")
    with pytest.raises(ComparisonError, match="at least 1"):
        precast.record(tmp_path / "a.run", split=0)


def test_the_probabilities_of_tokens_are_compared(model: Language, tmp_path: Path) -> None:
    tokens = _tokens()
    _record(tmp_path / "a.run", model, (tokens,), logits="head")
    with torch.no_grad():
        p = model(tokens).double().log_softmax(-1)
        model.head.weight += 0.03 * torch.randn_like(model.head.weight)
        q = model(tokens).double().log_softmax(-1)
    _record(tmp_path / "b.run", model, (tokens,), logits=lambda output: output)
    difference = precast.compare(tmp_path / "a.run", tmp_path / "b.run")
    result = difference.steps[0].tokens
    assert result is not None
    assert result.positions == ROWS * TOKENS
    assert result.flips == int((p.argmax(-1) != q.argmax(-1)).sum())
    divergence = float((p.exp() * (p - q)).sum(-1).mean())
    assert result.kl == pytest.approx(divergence, rel=0.5)
    following = tokens[:, 1:, None]
    apart = (p[:, :-1].gather(-1, following) - q[:, :-1].gather(-1, following)).abs()
    assert result.logprob_max >= float(apart.max()) - 1e-5
    assert result.logprob_mean == pytest.approx(float(apart.mean()), rel=0.5)
    plain = difference.to_dict()["steps"][0]["tokens"]
    assert set(plain) == {"positions", "flips", "logprob_mean", "logprob_max", "kl"}
    assert f"{result.flips} of {ROWS * TOKENS} likeliest tokens are others" in str(difference)
    difference.save(tmp_path / "page.html")
    assert "likeliest tokens are others" in (tmp_path / "page.html").read_text()
    with pytest.raises(ComparisonError, match="no module of that name"):
        precast.record(tmp_path / "a.run", model, logits="tail")


def test_two_files_are_cured_with_the_model_and_a_batch(tmp_path: Path) -> None:
    program = """
        import sys, torch, precast
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).eval()
        batch = torch.randn(8, 16)
        if __name__ == "__main__":
            with torch.no_grad(), precast.record(sys.argv[1], model):
                if sys.argv[1] == "a.run":
                    model(batch)
                else:
                    with precast.autocast("cpu", torch.bfloat16, policy="lean"):
                        model(batch)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    for name in ("a.run", "b.run"):
        subprocess.run([sys.executable, "program.py", name], cwd=tmp_path, check=True)
    words = [
        "-m",
        "precast",
        "compare",
        "a.run",
        "b.run",
        "--bound",
        "1e-4",
        "--report",
        "page.html",
    ]
    named = ["--model", "program:model", "--data", "program:batch"]
    for more, code in (([], 1), (named, 1), (named[:2], 2)):
        done = subprocess.run(
            [sys.executable, *words, "--json", *more],
            cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"},
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        if code == 1:
            cure = json.loads(done.stdout)["cure"]
            page = (tmp_path / "page.html").read_text()
            assert (cure is None) == (not more)
            assert ("--model MODULE:FACTORY" in page) == (cure is None)
    assert cure is not None
    assert 'base = "lean"' in cure
    (tmp_path / "cure.toml").write_text(cure)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).eval()
    x = torch.randn(8, 16)
    with torch.no_grad():
        right = model(x)
        attachment = precast.attach(model, str(tmp_path / "cure.toml"), hold=False)
        with precast.autocast("cpu", torch.bfloat16, policy=str(tmp_path / "cure.toml")):
            other = model(x)
        attachment.detach()
    assert float((right - other).norm() / right.norm()) < 1e-4
