"""Other people's models, shipped in every way, compute what they compute in a region, bit for bit."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="`make test-clients` runs these tests")

from tests.clients.shipped_cases import CASES, POLICIES
from tests.clients.shipped_ways import DTYPES, compared
from tests.support.processor import runs_lstm_in_bfloat16

# A module rule says nothing of names that a model has twice; what libraries warn of is theirs to repair.
pytestmark = pytest.mark.filterwarnings("ignore")

CANNOT = {
    ("LSTM", "torch", dtype)
    for dtype in ("float16", *(() if runs_lstm_in_bfloat16() else ("bfloat16",)))
}
"""PyTorch's own kernels refuse these on the CPU, in a region too; other policies run them in float32."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_what_is_shipped_is_the_model_in_a_region(name: str, policy: str, dtype: str) -> None:
    if name == "digits network":
        pytest.importorskip("sklearn", reason="its data are those of scikit-learn")
    result = compared(CASES[name], policy, DTYPES[dtype], ["converted"])
    if "scripted" in name:
        assert "refused" in result["converted"]
        assert "scripted" in result["converted"]
    elif (name, policy, dtype) in CANNOT:
        assert all("in a region too" in what for what in result.values()), result
    else:
        assert result == dict.fromkeys(result, "equal")


@pytest.mark.parametrize(
    ("name", "policy", "dtype"),
    [
        ("GAT", "default", "bfloat16"),
        ("MultiheadAttention", "module rules", "float16"),
        ("checkerboard network", "lean", "bfloat16"),
    ],
)
def test_a_sample_of_what_is_exported(name: str, policy: str, dtype: str) -> None:
    result = compared(CASES[name], policy, DTYPES[dtype], ["exported", "AOTInductor", "ONNX"])
    assert result["exported"] == result["AOTInductor"] == "equal"
    assert result["ONNX"].startswith(("equal on ", "differs by ")), result
