"""How long a process takes from its start to the first result of a model, and how much memory it needs for that.

A package and an exported program beside a process that makes the float32 model from its checkpoint and opens a region,
and one that loads the converted model with `precast.load`. A package is loaded as PyTorch documents it, which imports
its compiler, and by the loader under that, which does not (2.13). Each takes its turn in a process of its own; the time
is the parent's, from before the process is made until its first result has been computed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import precast
from benchmarks import networks
from benchmarks.interleave import Variant, compare
from benchmarks.networks import Network
from benchmarks.packages import PACKAGE
from benchmarks.shipping import fresh
from precast.errors import ExportError
from precast.shipping.exported_package import write_package

__all__ = ["CASE", "IN_REGION", "KINDS", "ROUNDS", "run"]

ROUNDS = 5
CASE = "decoder 512, 1x1"
IN_REGION = "float32 model, in a region"
_ROOT = Path(__file__).parent.parent
_DTYPE = torch.bfloat16
_NAMES = "float32.pt", "converted.pt", "program.pt2", "package.pt2", "inputs.pt"

_MODEL = """
from functools import partial
import torch
import precast
from benchmarks import networks
make = networks.decoder(512, 1, 1).model
inputs = torch.load("inputs.pt")
"""
KINDS: Mapping[str, str] = {
    IN_REGION: f"""{_MODEL}
model = make()
model.load_state_dict(torch.load("float32.pt"))
model.eval()
with torch.inference_mode(), precast.autocast("cpu", torch.bfloat16):
    model(inputs)
""",
    "precast.load": f"""{_MODEL}
model = precast.load(make, "converted.pt", "default", torch.bfloat16)
with torch.inference_mode():
    model(inputs)
""",
    "exported": """
import torch
run = torch.export.load("program.pt2").module()
with torch.no_grad():
    run(torch.load("inputs.pt"))
""",
    PACKAGE: """
import torch
run = torch._inductor.aoti_load_package("package.pt2")
with torch.no_grad():
    run(torch.load("inputs.pt"))
""",
    f"{PACKAGE}, loader alone": """
import torch
run = torch._C._aoti.AOTIModelPackageLoader("package.pt2", "model", False, 1, -1).run
with torch.no_grad():
    run([torch.load("inputs.pt")])
""",
}
"""What is started -> its program, which runs in the folder with the files."""
_PEAK = """
from pathlib import Path
status = Path("/proc/self/status").read_text()
print(status.partition("VmHWM:")[2].split()[0], flush=True)
"""
"""Linux alone tells the peak of a process; that of `resource` begins with its parent's."""
_KIB_PER_MIB = 1024


def run(*, rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """A row for each way to start."""
    if sys.platform != "linux":
        yield {"benchmark": "start", "case": "all", "skipped": "/proc is where Linux has it"}
        return
    with tempfile.TemporaryDirectory() as folder:
        why_not = _write_files(networks.decoder(512, 1, 1), Path(folder))
        peaks: dict[str, int] = {}
        works = {
            kind: Variant(partial(_start, kind, folder, peaks))
            for kind in KINDS
            if not why_not or not kind.startswith(PACKAGE)
        }
        result = compare(works, rounds=rounds, calls=1, untimed=0)
    for kind in KINDS:
        row = {"benchmark": "start", "case": CASE, "kind": kind, "rounds": rounds}
        if kind not in works:
            yield row | {"skipped": why_not}
            continue
        ratio, spread = result.ratio(kind, IN_REGION)
        seconds = {"median_s": result.median(kind), "ratio": ratio, "ratio_iqr": spread}
        yield row | seconds | {"peak_mib": peaks[kind] / _KIB_PER_MIB}


def _write_files(network: Network, folder: Path) -> str:
    """Writes what the processes load; returns why there is no package, if there is none."""
    float32, converted, program, package, given = (folder / name for name in _NAMES)
    model, inputs = fresh(network)
    torch.save(inputs, given)
    torch.save(model.state_dict(), float32)
    exported = precast.export(model, (inputs,), dtype=_DTYPE)
    torch.export.save(exported, program)
    in_16_bits = precast.convert(model, "default", _DTYPE, example=inputs, in_place=True)
    torch.save(in_16_bits.state_dict(), converted)
    try:
        write_package(exported, package)
    except ExportError as error:
        return str(error)
    return ""


def _start(kind: str, folder: str, peaks: dict[str, int]) -> None:
    """Starts a process, waits for its result, and notes the most memory that any of its kind had."""
    places = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KINDS[kind] + _PEAK],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"a process that starts {kind!r} failed: {done.stderr.strip()[-300:]}")
    peaks[kind] = max(peaks.get(kind, 0), int(done.stdout.split()[-1]))
