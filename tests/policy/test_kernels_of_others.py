"""Attention kernels of other libraries in regions, played by operators with the same schemas in plain PyTorch.

The schemas are those under which the libraries register their operators. What they refuse is what the libraries' own
checks refuse: other dtypes than 16 bits, different dtypes, slopes and scales that are not float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import precast
from precast.engine import registration
from precast.policy.policy import Policy

BF16, F32 = torch.bfloat16, torch.float32
_numbers = itertools.count()
# flash_attn/flash_attn_interface.py of Dao-AILab/flash-attention, registered as flash_attn::_flash_attn_forward.
FLASH_FORWARD = (
    "(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, int window_size_left, "
    "int window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
# sageattention/sm80_compile.py of thu-ml/SageAttention: `o` is written, and the schema does not say so.
SAGE_FORWARD = (
    "(Tensor q_int8, Tensor k_int8, Tensor v, Tensor o, Tensor q_scale, Tensor k_scale, int tensor_layout, "
    "int is_causal, int qk_quant_gran, float sm_scale, int return_lse) -> Tensor"
)


@pytest.fixture
def library() -> Iterator[tuple[str, torch.library.Library]]:
    """A namespace that nobody has used, to define operators in."""
    namespace = f"kernels{next(_numbers)}"
    made = torch.library.Library(namespace, "FRAGMENT")
    yield namespace, made
    registration.unregister()
    made._destroy()


@pytest.fixture
def flash(library: tuple[str, torch.library.Library]) -> tuple[str, Callable[..., Tensor]]:
    """The name of a stand-in for flash-attn's operator, and a stand-in for `flash_attn_func`."""
    namespace, made = library
    made.define(f"_flash_attn_forward{FLASH_FORWARD}")
    made.impl("_flash_attn_forward", flash_forward, "CPU")
    operator = getattr(torch.ops, namespace)._flash_attn_forward

    class Attention(torch.autograd.Function):
        """As FlashAttnFunc: it keeps the arguments that it got, and its backward takes them with the gradient."""

        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None) -> Tensor:
            out, lse, _, _ = operator(q, k, v, 0.0, 0.5, False, -1, -1, 0.0, slopes, False)
            ctx.save_for_backward(q, k, v, out, lse)
            return out  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            q, k, v, out, _ = ctx.saved_tensors
            refuse_other_dtypes(q, k, v, out, *gradients)
            return q, k, v, None  # what it is does not matter here

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None) -> Tensor:
        return Attention.apply(q, k, v, slopes)  # type: ignore[no-any-return]

    return f"{namespace}::_flash_attn_forward", flash_attn_func


def refuse_other_dtypes(q: Tensor, *others: Tensor) -> None:
    if q.dtype not in (torch.float16, BF16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if any(other.dtype is not q.dtype for other in others):
        raise RuntimeError("query and key must have the same dtype")


def flash_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    refuse_other_dtypes(q, k, v)
    slopes = rest[-2]
    if slopes is not None and slopes.dtype is not F32:
        raise RuntimeError("ALiBi slopes must have dtype fp32")
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    return out, q.new_zeros(1, dtype=F32), q.new_zeros(0), torch.zeros(2, dtype=torch.int64)


def like_cuda(name: str) -> Policy:
    return Policy.load(name).retarget("cpu", like="cuda")


def made_of_linears(
    attend: Callable[..., Tensor], policy: Policy, slopes: Tensor | None = None
) -> Tensor:
    """Attention whose queries and keys are normalized by `rms_norm`, as in many decoders since 2024."""
    x, weight = torch.randn(1, 3, 2, 8), torch.randn(8, 8, requires_grad=True)
    with precast.autocast("cpu", BF16, policy=policy):
        q, k = (F.rms_norm(F.linear(x, weight), (8,)) for _ in range(2))
        return attend(q, k, F.linear(x, weight), slopes)


@pytest.mark.parametrize("name", ["torch@2.11", "default@2.11", "lean"])
def test_where_rms_norm_stays_in_16_bits_attention_runs_and_trains(
    name: str, flash: tuple[str, Callable[..., Tensor]]
) -> None:
    for slopes in (None, torch.ones(2)):
        result = made_of_linears(flash[1], like_cuda(name), slopes)
        assert result.dtype is BF16
        result.float().sum().backward()


@pytest.mark.parametrize("name", ["torch@2.12", "default@2.12"])
def test_where_it_is_on_the_float32_list_attention_refuses(
    name: str, flash: tuple[str, Callable[..., Tensor]]
) -> None:
    with pytest.raises(RuntimeError, match="only support fp16 and bf16"):
        made_of_linears(flash[1], like_cuda(name))


def test_a_row_for_the_norm_alone_mends_it(flash: tuple[str, Callable[..., Tensor]]) -> None:
    policy = like_cuda("torch@2.12").replace(ops={"rms_norm": "keep"})
    made_of_linears(flash[1], policy).float().sum().backward()


def test_a_row_lower_for_the_kernel_helps_in_inference_alone(
    flash: tuple[str, Callable[..., Tensor]],
) -> None:
    """Its function saved what it was given, in float32, before the operator cast it."""
    name, attend = flash
    policy = like_cuda("torch@2.12").replace(ops={name: "lower"})
    with torch.no_grad():
        assert made_of_linears(attend, policy).dtype is BF16
    result = made_of_linears(attend, policy)
    with pytest.raises(RuntimeError, match="only support fp16 and bf16"):
        result.float().sum().backward()


def test_and_it_rounds_what_must_stay_float32(flash: tuple[str, Callable[..., Tensor]]) -> None:
    name, attend = flash
    policy = like_cuda("torch@2.12").replace(ops={name: "lower"})
    with torch.no_grad(), pytest.raises(RuntimeError, match="ALiBi slopes must have dtype fp32"):
        made_of_linears(attend, policy, torch.ones(2))


@pytest.mark.parametrize("rule", [None, "keep", "fallthrough"])
def test_a_quantized_kernel_keeps_its_scales_and_writes_where_it_was_told(
    rule: str | None, library: tuple[str, torch.library.Library]
) -> None:
    namespace, made = library
    made.define(f"qk_int8_sv_f16_accum_f32_attn{SAGE_FORWARD}")
    made.impl("qk_int8_sv_f16_accum_f32_attn", sage_forward, "CPU")
    name = f"{namespace}::qk_int8_sv_f16_accum_f32_attn"
    policy = Policy.load("default").replace(ops={name: rule} if rule else {})
    assert sage(namespace, policy).unique().tolist() == [1.0]


def test_a_row_lower_would_round_the_scales(library: tuple[str, torch.library.Library]) -> None:
    namespace, made = library
    made.define(f"qk_int8_sv_f16_accum_f32_attn{SAGE_FORWARD}")
    made.impl("qk_int8_sv_f16_accum_f32_attn", sage_forward, "CPU")
    name = f"{namespace}::qk_int8_sv_f16_accum_f32_attn"
    with pytest.raises(RuntimeError, match="q_scale must be float32"):
        sage(namespace, Policy.load("default").replace(ops={name: "lower"}))


def sage(namespace: str, policy: Policy) -> Tensor:
    q, out = torch.ones(1, 2, 2, 8, dtype=torch.int8), torch.zeros(1, 2, 2, 8, dtype=torch.float16)
    v, scale = torch.ones(1, 2, 2, 8, dtype=torch.float16), torch.ones(2)
    operator = getattr(torch.ops, namespace).qk_int8_sv_f16_accum_f32_attn
    with precast.autocast("cpu", BF16, policy=policy):
        operator(q, q, v, out, scale, scale, 0, 0, 1, 1.0, 0)
    return out


def sage_forward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, q_scale: Tensor, *_: Any) -> Tensor:
    if q_scale.dtype is not F32:
        raise RuntimeError("q_scale must be float32")
    o.copy_(v)
    return torch.zeros(0)
