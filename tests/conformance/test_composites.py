"""Composites: einsum, tensordot, multi_dot, bilinear, and others that call listed operations from C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conformance.compare import Make, assert_same, in_both_dtypes, refused, used
from tests.conformance.systems import System, on_all_systems


def of(call: Callable[..., Any], *shapes: tuple[int, ...]) -> Make:
    """`call` of weights of these shapes; of the first one computed, which no cache holds; and of that in 16 bits."""

    def make() -> Any:
        weights = nn.ParameterList([torch.randn(shape) for shape in shapes])

        def step() -> Any:
            first, *rest = weights
            lower = (first.reshape(-1, 1) @ torch.ones(1, 1)).reshape_as(first)
            return call(*weights), call(first * 2, *rest), refused(lambda: call(lower, *rest))

        return weights, step

    return make


EQUATIONS = [
    "ij->ji",
    "ii->i",
    "ij->i",
    "i,j->ij",
    "i,i->",
    "ij,j->i",
    "ij,ij->ij",
    "ij,ij->",
    "ij,jk->ik",
    "ij,jk",
    "ij,kj->ik",
    "ji,jk->ki",
    "ij,kl->ijkl",
    "bij,bjk->bik",
    "bij,jk->bik",
    "bhqd,bhkd->bhqk",
    "bhqk,bkhd->bqhd",
    "ijk,ilj->il",
    "ij,jk,kl->il",
    "ij,jk,kl,lm->im",
    "bn,anm,bm->ba",
    "ab,cb,cd,ad->",
    "...ij,...jk->...ik",
    "...i,ij->...j",
    "i...,i...->...",
    "A a, a b -> A b",
]


def einsum(equation: str) -> Make:
    terms = equation.partition("->")[0].replace("...", "xy").replace(" ", "").split(",")
    shapes = [tuple(2 + ord(letter) % 3 for letter in term) for term in terms]
    return of(lambda *operands: torch.einsum(equation, *operands), *shapes)


EINSUMS = {equation: einsum(equation) for equation in EQUATIONS}


@in_both_dtypes
@pytest.mark.parametrize("equation", EQUATIONS)
@on_all_systems
def test_einsum(system: System, equation: str, dtype: torch.dtype) -> None:
    assert_same(system, used, EINSUMS[equation], dtype)


@on_all_systems
def test_einsum_of_sublists(system: System) -> None:
    def make() -> Any:
        return of(lambda a, b: torch.einsum(a, [0, 1], b, [1, 2], [0, 2]), (2, 3), (3, 4))()

    assert_same(system, used, make, torch.bfloat16)


COMPOSITES: dict[str, Make] = {
    "tensordot": of(lambda a, b: torch.tensordot(a, b, dims=1), (2, 3), (3, 4)),
    "tensordot of none": of(lambda a, b: torch.tensordot(a, b, dims=0), (2,), (3,)),
    "tensordot of two": of(lambda a, b: torch.tensordot(a, b, dims=2), (2, 3, 4), (3, 4, 2)),
    "tensordot of chosen": of(
        lambda a, b: torch.tensordot(a, b, dims=([2, 0], [1, 2])), (2, 3, 4), (5, 4, 2)
    ),
    "multi_dot of two": of(lambda *m: torch.linalg.multi_dot(m), (2, 3), (3, 4)),
    "multi_dot of three": of(lambda *m: torch.linalg.multi_dot(m), (2, 3), (3, 4), (4, 2)),
    "multi_dot of five": of(
        lambda *m: torch.linalg.multi_dot(m), (2, 3), (3, 4), (4, 2), (2, 5), (5, 2)
    ),
    "multi_dot of vectors": of(lambda *m: torch.linalg.multi_dot(m), (3,), (3, 4), (4,)),
    "bilinear": of(F.bilinear, (2, 3), (2, 4), (5, 3, 4), (5,)),
    "bilinear without bias": of(F.bilinear, (2, 3), (2, 4), (5, 3, 4)),
    "matmul of many": of(torch.matmul, (2, 1, 3, 4), (5, 4, 2)),
    "matrix_power": of(lambda a: torch.linalg.matrix_power(a, 5), (3, 3)),
    "matrix_power below zero": of(
        lambda a: torch.linalg.matrix_power(a + 5 * torch.eye(3), -2), (3, 3)
    ),
    "kron": of(torch.kron, (2, 2), (2, 3)),
    "inner": of(torch.inner, (2, 3), (4, 3)),
    "outer": of(torch.outer, (2,), (3,)),
    "cov": of(torch.cov, (3, 4)),
    "corrcoef": of(torch.corrcoef, (3, 4)),
    "cosine_similarity": of(lambda a, b: F.cosine_similarity(a @ b, b), (3, 3), (3, 3)),
    "conv2d, same": of(lambda *a: F.conv2d(*a, padding="same"), (1, 2, 5, 5), (4, 2, 3, 3), (4,)),
    "convolution by groups": of(
        lambda *a: F.conv2d(*a, groups=2, stride=2, dilation=2), (1, 4, 7, 7), (4, 2, 3, 3)
    ),
    "unfolded": of(lambda x, w: F.fold(w @ F.unfold(x, 2), (3, 3), 1), (1, 2, 4, 4), (2, 8)),
    "tensorsolve": of(
        lambda a, b: torch.linalg.tensorsolve(a + 9 * torch.eye(6).reshape(2, 3, 6), b),
        (2, 3, 6),
        (2, 3),
    ),
    "lowrank": of(lambda a, b: (a @ b).norm(dim=0) + torch.linalg.norm(a @ b), (4, 2), (2, 4)),
}


@in_both_dtypes
@pytest.mark.parametrize("name", COMPOSITES)
@on_all_systems
def test_composites(system: System, name: str, dtype: torch.dtype) -> None:
    assert_same(system, used, COMPOSITES[name], dtype)
