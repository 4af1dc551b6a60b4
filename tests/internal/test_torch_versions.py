"""The versions of PyTorch: the declared range, one clear error on an older one, what differs between them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import precast
from precast import Policy
from precast._internal import torch_versions
from precast._torch import VERSION
from precast.engine import registration
from precast.errors import PolicyError, PrecastWarning, TorchVersionError
from precast.policy import preset_files, toml_file
from precast.policy.policy import DEVICE_TYPES, expanded_rules
from precast.policy.rows import Rule

ROOT = Path(__file__).parents[2]
Load = Callable[[str], Policy]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("2.13.0", (2, 13)),
        ("2.13.0+cpu", (2, 13)),
        ("2.11.0a0+gitdeadbeef", (2, 11)),
        ("2.16.0.dev20261101+cu130", (2, 16)),
        ("3.0", (3, 0)),
    ],
)
def test_major_and_minor_number_are_the_version(text: str, version: tuple[int, int]) -> None:
    assert torch_versions.parse(text) == version


@pytest.mark.parametrize("text", ["", "2", "main", "v2.13"])
def test_what_is_no_version(text: str) -> None:
    with pytest.raises(ValueError, match="is not a version"):
        torch_versions.parse(text)


def test_the_package_declares_the_range_that_is_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [declared] = [d for d in project["dependencies"] if d.startswith("torch")]
    first, (major, minor) = (
        torch_versions.spell(torch_versions.OLDEST),
        torch_versions.NEWEST,
    )
    assert declared == f"torch>={first},<{major}.{minor + 1}"


def test_these_tests_run_on_a_version_of_the_range() -> None:
    assert VERSION in torch_versions.supported()


@pytest.mark.parametrize("version", torch_versions.supported())
def test_a_version_of_the_range_passes_without_a_word(version: tuple[int, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch_versions.check(f"{torch_versions.spell(version)}.1+cpu") == version


def test_an_older_one_gets_an_error_with_what_there_is_and_what_to_do() -> None:
    with pytest.raises(TorchVersionError) as error:
        torch_versions.check("2.9.1+cpu")
    for part in ("2.9.1+cpu is installed", "2.11 to 2.15", 'pip install "torch>=2.11"'):
        assert part in str(error.value)


def test_a_newer_one_gets_a_warning_and_works() -> None:
    with pytest.warns(PrecastWarning, match=r"2\.99\.0 is newer than .*2\.11 to 2\.15"):
        assert torch_versions.check("2.99.0") == (2, 99)


_ON_ANOTHER = """
import importlib, json, sys, warnings
import torch
torch.__version__ = sys.argv[1]
warnings.simplefilter("always")
import precast
answers = {}
with warnings.catch_warnings(record=True) as heard:
    for name in precast.__all__ * 2:
        try:
            getattr(precast, name)
        except precast.errors.PrecastError as error:
            answers[name] = f"{type(error).__name__}: {error}"
print(json.dumps({"errors": answers, "warnings": [str(w.message) for w in heard]}))
"""


def on_another(version: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-c", _ON_ANOTHER, version], capture_output=True, text=True, check=True
    )
    answers: dict[str, Any] = json.loads(run.stdout)
    return answers


def test_on_an_older_one_all_that_needs_torch_says_so_and_the_rest_works() -> None:
    answers = on_another("2.2.2")
    without_torch = {"Conversion", "__version__", "errors", "events", "observe"}
    assert set(answers["errors"]) == set(precast.__all__) - without_torch
    assert len(set(answers["errors"].values())) == 1
    assert answers["errors"]["autocast"].startswith("TorchVersionError: PyTorch 2.2.2 is installed")
    assert not answers["warnings"]


def test_on_a_newer_one_all_works_after_one_warning() -> None:
    answers = on_another("2.99.0")
    assert not answers["errors"]
    assert len(answers["warnings"]) == 1


@pytest.mark.parametrize("command", ["demo", "doctor"])
def test_the_command_line_says_it_too(command: str) -> None:
    code = f'import torch; torch.__version__ = "2.2.2"; from precast.cli.main import main; main([{command!r}])'
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: PyTorch 2.2.2 is installed")


# --- tables ---


@pytest.mark.parametrize("name", Policy.presets())
def test_a_row_for_some_versions_is_for_some_of_the_supported_ones(name: str) -> None:
    text = (preset_files.FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    given = re.findall(r'(since|until) = "([\d.]+)"', text)
    assert len(given) == len(re.findall("since|until", re.sub(r"#.*", "", text)))
    for key, version in given:
        assert torch_versions.OLDEST < torch_versions.parse(version) <= torch_versions.NEWEST, (
            key,
            version,
        )


def test_the_tables_follow_the_version() -> None:
    def has(key: str, device: str) -> dict[tuple[int, int], bool]:
        versions = torch_versions.supported()
        return {v: key in toml_file.read("torch", v).tables[device] for v in versions}

    assert has("aten::rms_norm", "cuda") == {v: v >= (2, 12) for v in torch_versions.supported()}
    assert has("aten::cholesky", "cpu") == {v: v < (2, 14) for v in torch_versions.supported()}
    assert all(has("aten::linear", "cpu").values())


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def write_and_load(text: str) -> Policy:
        (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
        return Policy.load(tmp_path / "mine.toml")

    return write_and_load


NOW = torch_versions.spell(VERSION)
NEXT = torch_versions.spell((VERSION[0], VERSION[1] + 1))


@pytest.mark.parametrize("row", [f'since = "{NEXT}"', f'until = "{NOW}"'])
def test_a_row_for_other_versions_is_as_if_not_written(load: Load, row: str) -> None:
    base = Policy.load("torch")
    policy = load(f'base = "torch"\n[ops]\nlinear = {{ rule = "fp32", {row} }}\n')
    assert policy.tables == base.tables
    changed = base.replace(ops={"linear": {"rule": "fp32", **tomllib.loads(row)}})
    assert changed.tables == base.tables


@pytest.mark.parametrize(
    "row", [f'since = "{NOW}"', f'until = "{NEXT}"', f'since="2.0", until="{NEXT}"']
)
def test_a_row_for_this_version_holds_and_survives_a_dump(
    load: Load, row: str, tmp_path: Path
) -> None:
    policy = load(f'base = "torch"\n[ops]\nlinear = {{ rule = "fp32", {row} }}\n')
    assert policy.resolve("linear", "cpu").rule is Rule.FP32
    policy.save(tmp_path / "again.toml")
    again = Policy.load(tmp_path / "again.toml")
    assert again == policy
    assert again.rules("cpu")["aten::linear"].since == policy.rules("cpu")["aten::linear"].since
    x, weight = torch.randn(2, 4), torch.randn(3, 4)
    with precast.autocast("cpu", policy=policy):
        inside = F.linear(x, weight)
    assert torch.equal(inside, F.linear(x, weight))


def test_a_row_for_other_versions_may_name_what_this_one_has_not(load: Load) -> None:
    text = '[ops]\nlinear_of_tomorrow = { rule = "fp32", since = "%s" }\n'
    assert not load(text % NEXT).tables
    with pytest.raises(PolicyError, match="has no operation aten::linear_of_tomorrow"):
        load(text % NOW)


@pytest.mark.parametrize("version", ["2.13.1", "", "2", "new", 2.13])
def test_a_version_is_two_numbers_as_text(load: Load, version: object) -> None:
    text = f"[ops]\nexp = {{ rule = 'keep', since = {version!r} }}\n"
    if version == "":  # as if not given, like an empty reason
        assert load(text).rules("cpu")["aten::exp"].since == ""
        return
    with pytest.raises(PolicyError, match=r'mine\.toml: \[ops\] exp: since is .*since = "2\.13"'):
        load(text)


# --- what PyTorch does differently from version to version ---


@pytest.mark.skipif(VERSION >= (2, 13), reason="PyTorch has no named tensors since 2.13")
def test_overloads_that_take_names_of_dimensions_have_no_rows() -> None:
    for policy in map(Policy.load, Policy.presets()):
        for device in DEVICE_TYPES:
            assert not [
                n for n in expanded_rules(policy, device)[0] if re.search("imname|names", n)
            ]
    with pytest.raises(PolicyError, match="no overload 'Dimname'"):
        Policy.load("torch").replace(ops={"softmax.Dimname": "keep"})


@pytest.mark.skipif(VERSION >= (2, 13), reason="PyTorch has no named tensors since 2.13")
@pytest.mark.filterwarnings("ignore:Named tensors:UserWarning")
def test_a_known_limit_named_tensors_are_refused_by_kernels_in_python() -> None:
    named, weight = torch.ones(2, 3, names=("N", "C")), torch.ones(3, 3)
    assert registration.unregister()
    with torch.autocast("cpu"):
        assert F.linear(named, weight).dtype is torch.bfloat16
    with precast.autocast("cpu"), pytest.raises(RuntimeError, match="Named tensors are currently"):
        F.linear(named, weight)
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match="Named tensors are currently"):
        F.linear(named, weight)
