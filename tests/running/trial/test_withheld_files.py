"""Files that a trial withholds: nothing reaches the file system, and the program reads what it wrote."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

PROGRAM = """
import bz2, glob, io, json, os, pathlib, pickle, shutil, tempfile, zipfile
from precast.running.trial.withheld_files import WithheldFiles

os.mkdir("../overlay"); os.mkdir("../tmp"); tempfile.tempdir = os.path.abspath("../tmp")
files = WithheldFiles(pathlib.Path("../overlay"), pathlib.Path("../apart")); files.start()

os.makedirs("runs/one", exist_ok=True)
assert os.path.isdir("runs/one") and pathlib.Path("runs").exists()
with open("runs/one/log.txt", "w") as file:
    file.write("a")
with open("runs/one/log.txt", "a") as file:
    file.write("b")
assert pathlib.Path("runs/one/log.txt").read_text() == "ab"
assert os.listdir("runs/one") == ["log.txt"]
assert glob.glob("runs/*/*.txt") == ["runs/one/log.txt"]
assert [each[2] for each in os.walk("runs")] == [[], ["log.txt"]]

with open("old.txt", "a") as file:  # the old content is copied first
    file.write(" and new")
assert open("old.txt").read() == "old and new"
assert sorted(os.listdir(".")) == ["data", "gone", "old.txt", "program.py", "runs"]

os.replace("runs/one/log.txt", "moved.txt")
assert not os.path.exists("runs/one/log.txt") and open("moved.txt").read() == "ab"
os.remove("moved.txt")
assert not os.path.exists("moved.txt")
shutil.rmtree("gone")
assert not os.path.exists("gone/inside.txt")
os.mkdir("gone")
assert os.listdir("gone") == []
try:
    open("missing/file.txt", "w")
except FileNotFoundError as error:
    assert files.shown(error.filename) == os.path.abspath("missing/file.txt")
else:
    raise AssertionError("a folder that does not exist")
try:
    open("old.txt", "x")
except FileExistsError:
    pass
with zipfile.ZipFile("a.zip", "w") as archive:
    archive.writestr("x", "y")
assert zipfile.ZipFile("a.zip").read("x") == b"y"
pickle.dump(1, open("a.pickle", "wb"))
with bz2.open("a.bz2", "wb") as file:  # a module that took `open` by name
    file.write(b"z")
assert bz2.open("a.bz2").read() == b"z"
handle = os.open("b.txt", os.O_CREAT | os.O_WRONLY)
os.write(handle, b"b"); os.close(handle)
assert pathlib.Path("b.txt").stat().st_size == 1
shutil.copy("b.txt", "c.txt")
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "t").write_text("t")
os.chdir("runs")
open("in_runs.txt", "w").write("r")
os.chdir("..")
assert open("runs/in_runs.txt").read() == "r"
os.symlink("old.txt", "link.txt")
assert os.readlink("link.txt") == "old.txt" and open("link.txt").read() == "old and new"
assert not os.path.islink("data/kept.txt") and os.path.islink("data/real_link.txt")
open("data/other.txt", "w").close()  # the other entries are links to the real ones from now on
assert not os.path.islink("data/kept.txt") and os.path.islink("data/real_link.txt")
assert pathlib.Path("data/kept.txt").stat(follow_symlinks=False).st_size == 4
assert sorted(each[0] for each in os.walk("data")) == ["data", "data/inner"]
assert sorted(map(str, pathlib.Path("data").rglob("*.txt")))[:2] == ["data/inner/deep.txt", "data/kept.txt"]
os.rename("data", "data2")
open("data2/kept.txt", "a").write("!")
assert open("data2/kept.txt").read() == "kept!" and not os.path.exists("data/kept.txt")
os.remove(path="data2/kept.txt"); shutil.rmtree("data2/inner")
assert sorted(os.listdir(os.path.realpath("data2"))) == ["other.txt", "real_link.txt"]
shutil.rmtree("data2")
print(json.dumps([os.path.basename(each) for each in files.paths]))
"""


def test_what_a_program_writes_is_seen_by_it_alone(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    (folder / "gone").mkdir(parents=True)
    (folder / "data" / "inner").mkdir(parents=True)
    for name in ("kept", "inner/deep"):
        (folder / "data" / f"{name}.txt").write_text("kept")
    (folder / "data" / "real_link.txt").symlink_to("kept.txt")
    (folder / "gone" / "inside.txt").write_text("inside")
    (folder / "old.txt").write_text("old")
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "old.txt" in done.stdout
    assert "a.zip" in done.stdout
    assert sorted(os.listdir(folder)) == ["data", "gone", "old.txt", "program.py"]
    assert sorted(os.listdir(folder / "data")) == ["inner", "kept.txt", "real_link.txt"]
    assert (folder / "data" / "kept.txt").read_text() == "kept"
    assert os.listdir(folder / "data" / "inner") == ["deep.txt"]
    assert (folder / "old.txt").read_text() == "old"
    assert os.listdir(folder / "gone") == ["inside.txt"]
