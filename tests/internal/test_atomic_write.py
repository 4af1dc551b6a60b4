"""Files are written whole or not at all: a crash half way leaves the old one, by every door that writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precast._internal import atomic_write
from precast.errors import OutputError, PrecastError
from precast.policy.policy import Policy


def dumped(path: Path) -> None:
    Policy.load("torch").save(path)


def replaced(path: Path) -> None:
    atomic_write.replace(path, b"new")


@pytest.mark.parametrize("write", [replaced, dumped])
@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
def test_a_crash_half_way_leaves_the_old_file(
    write: Callable[[Path], None], step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, step, crash)
    with pytest.raises(KeyboardInterrupt):
        write(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
    monkeypatch.undo()
    write(path)
    assert path.read_bytes() != b"old"


def test_no_folder_is_made_where_none_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file or directory"):
        atomic_write.replace(tmp_path / "missing" / "file", b"new", make_folders=False)
    assert os.listdir(tmp_path) == []


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    atomic_write.replace(path, b"first")
    atomic_write.replace(path, b"second")
    assert path.read_bytes() == b"second"

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        atomic_write.replace(path, b"third")
    assert path.read_bytes() == b"second"
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


def test_a_full_disk_leaves_the_old_file_and_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    atomic_write.replace(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device; an existing file is unch"):
        atomic_write.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_disk_that_is_really_full_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    atomic_write.replace(path, b"old")
    made = atomic_write.tempfile.mkstemp

    def on_a_full_disk(**asked: Any) -> tuple[int, str]:
        handle, name = made(**asked)
        os.close(handle)
        return os.open("/dev/full", os.O_WRONLY), name

    monkeypatch.setattr(atomic_write.tempfile, "mkstemp", on_a_full_disk)
    with pytest.raises(
        OutputError, match=r"cannot write .*run\.json: No space left on device.*Free some space"
    ):
        atomic_write.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.mark.parametrize(
    ("under", "remedy"),
    [
        ("/proc/self/nowhere/run.json", "Create the folder, or name a file in an existing folder"),
        ("{file}/run.json", "Name a file in a folder"),
    ],
)
def test_a_folder_that_cannot_be_written_is_one_message(
    under: str, remedy: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    with pytest.raises(
        PrecastError, match=rf"cannot write .*; an existing file is unchanged\. {remedy}$"
    ):
        atomic_write.replace(Path(under.format(file=file)), b"new")
    assert file.read_text() == "no folder"


def test_folders_are_made_and_a_link_is_followed(tmp_path: Path) -> None:
    atomic_write.replace(tmp_path / "runs" / "3" / "run.json", b"first")
    link = tmp_path / "latest.json"
    link.symlink_to(tmp_path / "runs" / "3" / "run.json")
    atomic_write.replace(link, b"second")
    assert link.is_symlink()
    assert (tmp_path / "runs" / "3" / "run.json").read_bytes() == b"second"


def test_a_pipe_or_a_device_stays_what_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    atomic_write.replace(pipe, b"new")
    assert os.read(reader, 9) == b"new"
    os.close(reader)
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_process_that_is_killed_while_it_writes_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    atomic_write.replace(path, b"old")
    code = (
        "import os, pathlib, sys, time\n"
        "from precast._internal import atomic_write\n"
        "def hang(_):\n    print('writing', flush=True)\n    time.sleep(60)\n"
        "os.fsync = hang\n"
        "atomic_write.replace(pathlib.Path(sys.argv[1]), b'half')\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"writing\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    assert path.read_bytes() == b"old"
    [left] = [name for name in os.listdir(tmp_path) if name != "run.json"]
    assert left.startswith(".run.json.")
