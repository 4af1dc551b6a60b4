"""`precast-lint check` on other people's projects: `python -m tools.check_projects` writes a section of docs/check.md.

It installs pinned versions, without what they depend on, checks them with the default rules, and applies every
safe fix to copies: what is fixed must compile, a second run must change nothing, and what could be imported
before must still be. Findings go to docs/data/check_projects.json; docs/data/check_verdicts.json says of each,
after it was read, whether it is right, and useful. Precision by rule is computed from both, here and nowhere else.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from precast_lint.running.cache import Cache
from precast_lint.running.files import find
from precast_lint.running.report import FileReport, Reported
from precast_lint.running.runner import Mode, run, run_text
from precast_lint.selecting.pins import oldest_torch
from precast_lint.selecting.settings import Settings
from tools.check_projects_page import write

__all__ = ["LATER", "PROJECTS", "Project", "examine", "main"]

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".venvs" / "projects"
RESULTS = ROOT / "docs" / "data" / "check_projects.json"


@dataclass(frozen=True)
class Project:
    """A distribution, and the folders that it installs; torch is the one of this environment."""

    name: str
    version: str
    packages: tuple[str, ...]

    @property
    def is_only_counted(self) -> bool:
        """Whether no rule is mended for what is found in it: it says how the rules do on code that is new to them."""
        return self in LATER and hashlib.sha256(self.name.lower().encode()).digest()[-1] % 2 == 1


PROJECTS = (
    Project("accelerate", "1.15.0", ("accelerate",)),
    Project("catalyst", "22.4", ("catalyst",)),
    Project("composer", "0.32.1", ("composer",)),
    Project("dalle2-pytorch", "1.15.6", ("dalle2_pytorch",)),
    Project("deeplabcut", "3.0.2", ("deeplabcut",)),
    Project("diffusers", "0.42.1", ("diffusers",)),
    Project("espnet", "202511", ("espnet", "espnet2")),
    Project("fastai", "2.8.12", ("fastai",)),
    Project("imagen-pytorch", "2.1.0", ("imagen_pytorch",)),
    Project("kornia", "0.9.0", ("kornia",)),
    Project("lightly", "1.6.0", ("lightly",)),
    Project("lightning", "2.6.6", ("lightning",)),
    Project("mmdet", "3.3.0", ("mmdet",)),
    Project("mmengine", "0.10.7", ("mmengine",)),
    Project("monai", "1.6.1", ("monai",)),
    Project("nemo-toolkit", "3.0.0", ("nemo",)),
    Project("nerfstudio", "1.1.5", ("nerfstudio",)),
    Project("open-clip-torch", "3.3.0", ("open_clip", "open_clip_train")),
    Project("peft", "0.21.2", ("peft",)),
    Project("pytorch-ignite", "0.5.5", ("ignite",)),
    Project("pytorch-toolbelt", "0.8.0", ("pytorch_toolbelt",)),
    Project("rfdetr", "1.11.2", ("rfdetr",)),
    Project("so-vits-svc-fork", "4.2.30", ("so_vits_svc_fork",)),
    Project("speechbrain", "1.1.2", ("speechbrain",)),
    Project("super-gradients", "3.7.1", ("super_gradients",)),
    Project("timm", "1.0.31", ("timm",)),
    Project("torch-geometric", "2.8.1", ("torch_geometric",)),
    Project("torchtnt", "0.2.4", ("torchtnt",)),
    Project("torchtune", "0.6.1", ("torchtune",)),
    Project("transformers", "5.23.0", ("transformers",)),
    Project("trl", "1.16.0", ("trl",)),
    Project("ultralytics", "8.4.190", ("ultralytics",)),
    Project("x-transformers", "2.31.10", ("x_transformers",)),
    Project("yolov5", "7.0.14", ("yolov5",)),
    Project("torch", importlib.metadata.version("torch").partition("+")[0], ("torch",)),
)
# Those that came later: half of them, by a hash of the name, is only counted.
LATER = (
    Project("anomalib", "2.7.0", ("anomalib",)),
    Project("asteroid", "0.7.0", ("asteroid",)),
    Project("audiolm-pytorch", "2.4.0", ("audiolm_pytorch",)),
    Project("cellpose", "4.2.1.1", ("cellpose",)),
    Project("coqui-tts", "0.28.0", ("TTS",)),
    Project("darts", "0.48.1", ("darts",)),
    Project("deepchem", "2.8.0", ("deepchem",)),
    Project("denoising-diffusion-pytorch", "2.3.4", ("denoising_diffusion_pytorch",)),
    Project("easyocr", "1.7.2", ("easyocr",)),
    Project("effdet", "0.4.1", ("effdet",)),
    Project("flair", "0.15.1", ("flair",)),
    Project("funasr", "1.4.16", ("funasr",)),
    Project("gluonts", "0.17.0", ("gluonts",)),
    Project("k-diffusion", "0.1.1.post1", ("k_diffusion",)),
    Project("litgpt", "0.5.13", ("litgpt",)),
    Project("mmpose", "1.3.2", ("mmpose",)),
    Project("mmpretrain", "1.2.0", ("mmpretrain",)),
    Project("mmsegmentation", "1.2.2", ("mmseg",)),
    Project("modelscope", "1.40.2", ("modelscope",)),
    Project("ms-swift", "4.6.0", ("swift",)),
    Project("nerfacc", "0.5.3", ("nerfacc",)),
    Project("neuralforecast", "3.3.0", ("neuralforecast",)),
    Project("nncf", "3.4.0", ("nncf",)),
    Project("opacus", "1.6.0", ("opacus",)),
    Project("open-flamingo", "2.0.1", ("open_flamingo",)),
    Project("OpenNMT-py", "3.5.1", ("onmt",)),
    Project("pyannote.audio", "4.0.7", ("pyannote",)),
    Project("python-doctr", "1.1.0", ("doctr",)),
    Project("pytorch-forecasting", "1.8.0", ("pytorch_forecasting",)),
    Project("pytorch-metric-learning", "2.9.0", ("pytorch_metric_learning",)),
    Project("recbole", "1.2.1", ("recbole",)),
    Project("salesforce-lavis", "1.0.2", ("lavis",)),
    Project("segmentation-models-pytorch", "0.6.0", ("segmentation_models_pytorch",)),
    Project("sentence-transformers", "6.2.0", ("sentence_transformers",)),
)
# Not looked at, only there so that more of the others can be imported.
HELPERS = (
    *("einops==0.8.2", "einx==0.4.3", "fastcore==2.2.39", "huggingface-hub==2.4.0"),
    *("lightning-utilities==0.15.3", "loguru==0.7.3", "safetensors==0.8.0", "tokenizers==0.23.3"),
    *("torch-einops-utils==0.2.0", "torchmetrics==1.9.0", "xxhash==4.1.0"),
)


def install(folder: Path, projects: Sequence[Project]) -> None:
    """Puts the projects, and what helps to import them, into a folder; what is there stays."""
    wanted = [f"{p.name}=={p.version}" for p in projects if p.name != "torch"]
    for requirement in [*wanted, *HELPERS]:
        name, _, version = requirement.partition("==")
        if _metadata(folder, name, version) is None:
            _install(folder, requirement)


def _metadata(folder: Path, name: str, version: str) -> Path | None:
    """The folder in which pip has written down what a distribution is."""
    parts = re.sub(r"[-_.]+", "_", name)
    return next(iter(folder.glob(f"{parts}-{version}*.dist-info")), None)


def oldest(project: Project, folder: Path) -> str | None:
    """The oldest PyTorch that a project allows, which its files of requirements would say if they were installed."""
    metadata = _metadata(folder, project.name, project.version)
    if metadata is None:
        return None
    lines = (metadata / "METADATA").read_text(encoding="utf-8", errors="replace").splitlines()
    needs = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "requirements.txt").write_text("\n".join(needs), encoding="utf-8")
        return oldest_torch(Path(place))


def _install(folder: Path, requirement: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--only-binary", ":all:", "--target", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        click.echo(f"not installed: {requirement}: {lines[-1] if lines else '?'}", err=True)


def roots(project: Project, folder: Path) -> list[Path]:
    """The folders of a project."""
    if project.name == "torch":
        spec = find_spec("torch")
        assert spec is not None
        assert spec.origin is not None
        return [Path(spec.origin).parent]
    return [folder / package for package in project.packages]


def examine(project: Project, folder: Path) -> dict[str, Any]:
    """Checks and fixes a project, and says what came of it."""
    where = roots(project, folder)
    settings = Settings(min_torch=oldest(project, folder))
    files = list(find(where, settings))
    start = time.perf_counter()
    reports = run(files, settings, Mode(), Cache(None, settings))
    seconds = time.perf_counter() - start
    mendable = [Path(r.filename) for r in reports if any(_is_safe(f) for f in r.findings)]
    fixed = run(mendable, settings, Mode(fix=True), Cache(None, settings))
    changed = {report.filename: report.after for report in fixed if report.after is not None}
    base = where[0].parent
    return {
        "name": project.name,
        "version": project.version,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "only_counted": project.is_only_counted,
        "min_torch": settings.min_torch,
        "files": len(files),
        "lines": sum(path.read_bytes().count(b"\n") for path in files if path.is_file()),
        "seconds": round(seconds, 1),
        "findings": list(_findings(reports, base)),
        "fixed": sum(len(report.fixed) for report in fixed),
        "changed": len(changed),
        "broken": _broken(changed, base, settings),
        **_imports(changed, base, folder),
    }


def _is_safe(finding: Reported) -> bool:
    return finding.fix is not None and finding.fix["applicability"] == "safe"


def _findings(reports: Sequence[FileReport], base: Path) -> Iterator[dict[str, Any]]:
    for report in reports:
        if report.failed:
            raise click.ClickException(f"{report.filename}: {report.note}")
        for found in report.findings:
            yield {
                "file": Path(found.filename).relative_to(base).as_posix(),
                "row": found.row,
                "code": found.code,
                "line": found.line.strip()[:160],
            }


def _broken(changed: dict[str, bytes], base: Path, settings: Settings) -> list[str]:
    """What is wrong with fixed files: they do not compile, or a second run changes them again."""
    wrong = []
    for filename, data in changed.items():
        name = Path(filename).relative_to(base).as_posix()
        try:
            compile(data, filename, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            wrong.append(f"{name}: {error}")
        if run_text(filename, data, settings, Mode(fix=True)).after is not None:
            wrong.append(f"{name}: a second run changes it")
    return wrong


# Imports modules and prints those that could be; sources in the overlay are read instead of the installed ones.
_IMPORT = """
import importlib, importlib.machinery, importlib.util, json, sys, warnings
warnings.simplefilter("ignore")
site, overlay, names = json.load(sys.stdin)
sys.path.insert(0, site)
sys.dont_write_bytecode = True
importlib.machinery.SourceFileLoader._cache_bytecode = lambda *_: None
read = importlib.machinery.SourceFileLoader.get_data
def get_data(self, path):
    if path.endswith(".pyc"):
        raise OSError("sources only")
    if path in overlay:
        path = overlay[path]
    return read(self, path)
importlib.machinery.SourceFileLoader.get_data = get_data
for name in names:
    try:
        importlib.import_module(name)
    except BaseException:
        continue
    print("imported:", name, flush=True)
"""


def _imports(changed: dict[str, bytes], base: Path, folder: Path) -> dict[str, Any]:
    """How many of the changed modules can be imported as they were, and which of them not any more."""
    copies = folder.parent / "fixed"
    overlay: dict[str, str] = {}
    names = []
    for filename, data in changed.items():
        path = Path(filename)
        if path.suffix != ".py":
            continue
        copy = copies / path.relative_to(base)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(data)
        overlay[filename] = str(copy)
        parts = path.relative_to(base).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    before, after = (_imported(folder, use, names) for use in ({}, overlay))
    return {"importable": len(before), "lost": sorted(before - after)}


def _imported(folder: Path, overlay: dict[str, str], names: list[str]) -> set[str]:
    if not names:
        return set()
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT],
        input=json.dumps([str(folder), overlay, names]),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    return {name for kind, _, name in lines if kind == "imported"}


@click.command()
@click.option("--only", multiple=True, help="These projects; the results of the others stay.")
@click.option("--folder", type=click.Path(path_type=Path), default=FOLDER, show_default=True)
@click.option("--render", is_flag=True, help="Only write the page anew, from results and verdicts.")
def main(only: tuple[str, ...], folder: Path, render: bool) -> None:
    """Check other people's projects, and write down what was found."""
    if not render:
        projects = [project for project in (*PROJECTS, *LATER) if not only or project.name in only]
        site = folder / "site"
        install(site, projects)
        for project in projects:
            if not all(root.is_dir() for root in roots(project, site)):
                continue
            found = examine(project, site)
            codes = Counter(finding["code"] for finding in found["findings"])
            click.echo(f"{found['name']} {found['version']}: {dict(sorted(codes.items()))}")
            for text in [*found["broken"], *found["lost"]]:
                click.echo(f"  wrong: {text}")
            _keep(found)
    write()


def _keep(found: dict[str, Any]) -> None:
    """Puts one project's results into the file, at once: a run is long."""
    known: dict[str, Any] = {"projects": []}
    if RESULTS.exists():
        known = json.loads(RESULTS.read_text(encoding="utf-8"))
    rest = [project for project in known["projects"] if project["name"] != found["name"]]
    document = {"projects": sorted([*rest, found], key=lambda project: str(project["name"]))}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
