"""Files of exported programs that another version has written, or that are damaged: one error that says which it is."""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import precast
from precast import Policy
from precast.errors import ExportError
from precast.shipping import exported_file

MODEL, FACTS = "models/model.json", "extra/precast.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    program = precast.export(nn.Linear(4, 2), (torch.ones(1, 4),))
    exported_file.write(program, path, Policy.load("default"))
    return path


def _changed(part: str, change: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    """Writes a file again, with one of its parts changed."""

    def write(whole: Path, path: Path) -> None:
        with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w") as new:
            assert [name for name in old.namelist() if name.endswith(part)], part
            for name in old.namelist():
                content = old.read(name)
                new.writestr(name, change(content) if name.endswith(part) else content)

    return write


def _json(**values: object) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(json.loads(content) | values).encode()


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    def write(whole: Path, path: Path) -> None:
        path.write_bytes(change(whole.read_bytes()))

    return write


WRITTEN = r"cannot read this program: .*PyTorch \S+ has written it; .*exported again"
BROKEN: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "another archive": (
        _changed("archive_version", lambda _: b"99"),
        r"version 99 .*exported again",
    ),
    "another schema": (
        _changed(MODEL, _json(schema_version={"major": 99, "minor": 1})),
        r"schema version .*99.* PyTorch \S+ has written it; .*exported again",
    ),
    "facts that are none": (_changed(FACTS, lambda _: b"["), r"damaged: precast\.json"),
    "a program cut short": (_changed(MODEL, lambda text: text[:100]), WRITTEN),
    "a weight cut short": (_changed("weights/weight_0", lambda data: data[:4]), WRITTEN),
    "no end": (_bytes(lambda data: data[: len(data) // 2]), "only a part of one"),
    "a part of the end": (_bytes(lambda data: data[:-30]), "cannot read this program|only a part"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_says_why_in_one_error(
    name: str, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write, message = BROKEN[name]
    write(whole, tmp_path / "model.pt2")
    with (
        caplog.at_level(logging.WARNING, logger="torch.export"),
        pytest.raises(ExportError, match=message) as error,
    ):
        exported_file.read(tmp_path / "model.pt2")
    assert "model.pt2" in str(error.value)
    assert "\n" not in str(error.value)
    assert not [record for record in caplog.records if record.exc_info], "PyTorch logs a traceback"


def test_what_a_file_says_of_itself(whole: Path) -> None:
    assert isinstance(exported_file.read(whole), torch.export.ExportedProgram)
    said = exported_file.policy_facts(whole)
    assert said["policy"] == "default"
    assert said["torch"] == torch.__version__
