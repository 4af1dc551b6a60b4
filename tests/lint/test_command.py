"""`precast-lint check`, `fix` and `rule` as programs: exit codes, formats, files of every kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from precast_lint.cli import main
from precast_lint.running import runner

OLD = "import torch\n\nwith torch.cuda.amp.autocast():\n    pass\n"
NEW = 'import torch\n\nwith torch.amp.autocast("cuda"):\n    pass\n'
UNFIXABLE = "import torch\n\nwith torch.cuda.amp.autocast(*args):\n    pass\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.precast.check]\n")
    return tmp_path


def precast_(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


def test_findings_exit_with_one_and_a_clean_tree_with_zero(here: Path) -> None:
    (here / "a.py").write_text(OLD)
    result = precast_("check", "a.py")
    assert result.exit_code == 1
    assert "a.py:3:6: AMP001 [*]" in result.stdout
    assert "^^^^^" in result.stdout
    assert precast_("check", "a.py", "--exit-zero").exit_code == 0
    (here / "a.py").write_text(NEW)
    clean = precast_("check")
    assert clean.exit_code == 0
    assert clean.stdout == "All checks passed.\n"


def test_fix_leaves_a_read_only_file_alone_and_names_it(here: Path) -> None:
    (here / "a.py").write_text(OLD)
    (here / "a.py").chmod(0o444)
    result = precast_("check", "--fix", "a.py")
    assert result.exit_code == 1
    assert "a.py: it is read-only and was not changed" in result.stderr
    assert "AMP001" in result.stdout
    assert (here / "a.py").read_text() == OLD


@pytest.mark.parametrize("options", [[], ["--fix"]], ids=str)
def test_a_diff_tells_of_fixes_that_it_leaves_out(here: Path, options: list[str]) -> None:
    (here / "a.py").write_text("from torch.cuda.amp import GradScaler\n")
    result = precast_("check", *options, "--diff", "a.py")
    assert result.stdout == ""
    assert "1 more with `--unsafe-fixes`" in result.stderr


def test_an_unsafe_fix_of_an_import_says_why(here: Path) -> None:
    (here / "a.py").write_text("from torch.cuda.amp import GradScaler\n")
    result = precast_("check", "a.py")
    assert "other files may import it from here" in result.stdout


def test_fix_leaves_no_import_behind(here: Path) -> None:
    (here / "a.py").write_text("import torch.cuda.amp\n" + OLD)
    assert precast_("check", "--fix", "a.py").exit_code == 0
    assert (here / "a.py").read_text() == NEW


def test_fix_writes_what_diff_shows_and_keeps_the_mode(here: Path) -> None:
    path = here / "a.py"
    path.write_bytes(OLD.replace("\n", "\r\n").encode())
    path.chmod(0o750)
    shown = precast_("check", "--fix", "--diff", "a.py")
    assert shown.exit_code == 1
    assert path.read_bytes() == OLD.replace("\n", "\r\n").encode()
    fixed = precast_("check", "--fix", "a.py")
    assert fixed.exit_code == 0
    assert "1 fixed, 0 left" in fixed.stdout
    assert path.read_bytes() == NEW.replace("\n", "\r\n").encode()
    assert path.stat().st_mode & 0o777 == 0o750
    removed = [line[1:] for line in shown.stdout.split("\n") if line.startswith("-with")]
    added = [line[1:] for line in shown.stdout.split("\n") if line.startswith("+with")]
    assert removed[0].rstrip("\r") == OLD.split("\n")[2]
    assert added[0].rstrip("\r") == NEW.split("\n")[2]
    assert precast_("check", "--fix", "--diff", "a.py").exit_code == 0


def test_check_with_fix_reports_what_is_left(here: Path) -> None:
    (here / "a.py").write_text(UNFIXABLE)
    left = precast_("check", "--fix", "a.py")
    assert left.exit_code == 1
    assert "AMP001" in left.stdout
    assert (here / "a.py").read_text() == UNFIXABLE


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "--select", "AMP999", "a.py"),
        ("check", "--min-torch", "new", "a.py"),
        ("check", "missing.py"),
        ("check", "-", "a.py"),
        ("check", "--explain", "AMP999"),
    ],
)
def test_what_is_asked_wrongly_exits_with_two(here: Path, arguments: tuple[str, ...]) -> None:
    (here / "a.py").write_text(OLD)
    result = precast_(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("Error: ") == 1


def test_settings_come_from_pyproject(here: Path) -> None:
    (here / "a.py").write_text(OLD)
    (here / "old").mkdir()
    (here / "old" / "b.py").write_text(OLD)
    table = '[tool.precast.check]\nexclude = ["old"]\n'
    (here / "pyproject.toml").write_text(table)
    assert "b.py" not in precast_("check").stdout
    (here / "pyproject.toml").write_text(
        table + '[tool.precast.check.per-file-ignores]\n"a.py" = ["AMP0"]\n'
    )
    assert precast_("check").exit_code == 0
    (here / "pyproject.toml").write_text(table + 'ignore = ["cuda-autocast"]\n')
    assert precast_("check").exit_code == 0
    (here / "pyproject.toml").write_text('[project]\ndependencies = ["torch>=1.10,<3"]\n')
    assert precast_("check").exit_code == 0
    assert precast_("check", "--min-torch", "2.4").exit_code == 1
    (here / "pyproject.toml").write_text("[tool.precast.check]\nselct = []\n")
    wrong = precast_("check")
    assert wrong.exit_code == 2
    assert "selct" in wrong.stderr


def test_json_has_the_keys_that_readers_of_ruff_expect(here: Path) -> None:
    (here / "a.py").write_text(OLD)
    [finding] = json.loads(precast_("check", "a.py", "--output-format", "json").stdout)
    assert finding["code"] == "AMP001"
    assert finding["location"] == {"row": 3, "column": 6}
    assert finding["end_location"] == {"row": 3, "column": 31}
    assert finding["fix"]["applicability"] == "safe"
    assert finding["noqa_row"] == 3
    edits = finding["fix"]["edits"]
    assert [edit["content"] for edit in edits] == ["torch.amp", '"cuda"']


def test_annotations_for_github(here: Path) -> None:
    (here / "a.py").write_text(OLD)
    line = precast_("check", "a.py", "--output-format", "github").stdout
    assert line.startswith("::warning title=precast-lint (AMP001),file=a.py,line=3,col=6,")


def test_statistics_counts_by_rule(here: Path) -> None:
    (here / "a.py").write_text(OLD + OLD)
    assert "     2  AMP001  cuda-autocast" in precast_("check", "--statistics").stdout


def test_stdin_comes_out_fixed(here: Path) -> None:
    result = precast_("check", "--fix", "-", "--stdin-filename", "src/x.py", stdin=OLD.encode())
    assert result.stdout == NEW
    assert result.exit_code == 0
    results = precast_("check", "-", "--stdin-filename", "src/x.py", stdin=OLD.encode())
    assert "src/x.py:3:6" in results.stdout
    assert results.exit_code == 1


# --- comments that silence ---


def test_comments_silence_findings_and_unused_ones_are_found(here: Path) -> None:
    line = "with torch.cuda.amp.autocast():"
    (here / "a.py").write_text(OLD.replace(line, line + "  # noqa: AMP001"))
    assert precast_("check").exit_code == 0
    (here / "a.py").write_text("# precast: noqa\n" + OLD)
    assert precast_("check").exit_code == 0
    (here / "a.py").write_text(NEW.replace("pass", "pass  # noqa: E501, AMP001"))
    unused = precast_("check")
    assert "AMP901" in unused.stdout
    precast_("check", "--fix")
    assert (here / "a.py").read_text() == NEW.replace("pass", "pass  # noqa: E501")


@pytest.mark.parametrize(
    "silent",
    [
        "# precast: noqa\nx = 1  # noqa: AMP001\n",
        "# precast: noqa: AMP901\nx = 1  # noqa: AMP001\n",
        "x = 1  # noqa: AMP001, AMP901\n",
    ],
)
def test_an_unused_suppression_is_silenced_like_any_finding(here: Path, silent: str) -> None:
    (here / "a.py").write_text(silent)
    assert precast_("check").exit_code == 0
    (here / "a.py").write_text(silent.replace("precast: noqa", "").replace(", AMP901", ""))
    assert "AMP901" in precast_("check").stdout


def test_a_silenced_use_keeps_the_fix_it_shares_from_the_others(here: Path) -> None:
    text = "from torch.cuda.amp import autocast\n\na = autocast()\nb = autocast()  # noqa: AMP001\n"
    (here / "a.py").write_text(text)
    assert precast_("check", "--fix").exit_code == 1
    assert (here / "a.py").read_text() == text


# --- files of every kind ---


def test_odd_files_are_noted_and_the_others_checked(here: Path) -> None:
    (here / "a.py").write_text(OLD)
    (here / "broken.py").write_text("import torch\ntorch.cuda.amp.autocast(\n")
    (here / "latin.py").write_bytes(b"# caf\xe9\nfrom torch.cuda.amp import autocast\n")
    (here / "large.py").write_bytes(b"#" * (11 * 2**20))
    (here / "loop.py").symlink_to(here / "loop.py")
    (here / "folder").mkdir()
    (here / "folder" / "up").symlink_to(here, target_is_directory=True)
    os.mkfifo(here / "pipe.py")
    (here / "null.py").write_bytes(b"autocast cuda\0torch")
    (here / "empty.ipynb").write_bytes(b"autocast cuda {")
    result = precast_("check", "--output-format", "concise")
    assert result.exit_code == 1
    assert "a.py:3:6: AMP001" in result.stdout
    assert "broken.py:" in result.stdout
    assert "AMP900" in result.stdout
    for name in ("latin.py", "large.py", "loop.py", "pipe.py", "empty.ipynb"):
        assert f"skipped {name}" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_encoding_is_kept(here: Path) -> None:
    old = ("# -*- coding: latin-1 -*-\n# café\n" + OLD).encode("latin-1")
    (here / "a.py").write_bytes(old)
    assert precast_("check", "--fix").exit_code == 0
    assert (here / "a.py").read_bytes() == ("# -*- coding: latin-1 -*-\n# café\n" + NEW).encode(
        "latin-1"
    )


def test_a_link_stays_a_link(here: Path) -> None:
    (here / "real.txt").write_text(OLD)
    (here / "a.py").symlink_to(here / "real.txt")
    assert precast_("check", "--fix", "a.py").exit_code == 0
    assert (here / "a.py").is_symlink()
    assert (here / "real.txt").read_text() == NEW


def test_many_files_in_processes_give_what_one_process_gives(here: Path) -> None:
    for number in range(2 * runner._FEW):
        (here / f"f{number:02}.py").write_text(OLD)
    outputs = [precast_("check", "--jobs", jobs).stdout for jobs in ("1", "2")]
    assert outputs[0] == outputs[1]
    assert outputs[0].count("AMP001") == 2 * runner._FEW


# --- notebooks ---


def test_a_notebook_changes_only_where_it_is_fixed(here: Path) -> None:
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["torch.cuda.amp.autocast()\n", "é"]},
        {
            "cell_type": "code",
            "source": ["%matplotlib inline\n", "!pip install x\n", ",print x\n", "import torch"],
        },
        {"cell_type": "code", "source": ["%%bash\n", "ls"]},
        {
            "cell_type": "code",
            "source": ["with torch.cuda.amp.autocast():\n", "    ?x\n", "    pass"],
        },
    ]
    path = here / "a.ipynb"
    before = json.dumps({"nbformat": 4, "cells": cells}, indent=1, ensure_ascii=False) + "\n"
    path.write_text(before, encoding="utf-8")
    result = precast_("check", "--output-format", "concise")
    assert "a.ipynb:cell 4:1:6: AMP001" in result.stdout
    assert precast_("check", "--fix").exit_code == 0
    old, new = "torch.cuda.amp.autocast():", 'torch.amp.autocast(\\"cuda\\"):'
    assert path.read_text(encoding="utf-8") == before.replace(f"with {old}", f"with {new}")


def _notebook(path: Path, *cells: str, language: str = "python") -> None:
    document = {
        "metadata": {"language_info": {"name": language}},
        "cells": [{"cell_type": "code", "source": cell} for cell in cells],
    }
    path.write_text(json.dumps(document))


def test_edits_in_a_notebook_say_in_which_cell(here: Path) -> None:
    uses = "x = 1\nscaler = GradScaler()"
    _notebook(here / "a.ipynb", "from torch.cuda.amp import GradScaler", uses)
    result = json.loads(precast_("check", "--output-format", "json").stdout)
    call = next(finding for finding in result if finding["code"] == "AMP003")
    assert (call["cell"], call["location"]) == (2, {"row": 2, "column": 10})
    edits = [(e["cell"], e["location"], e["content"]) for e in call["fix"]["edits"]]
    assert edits == [
        (1, {"row": 1, "column": 6}, "torch.amp"),
        (2, {"row": 2, "column": 21}, '"cuda"'),
    ]
    assert call["fix"]["edits"][0]["end_location"] == {"row": 1, "column": 20}


def test_cells_that_are_not_python_are_one_finding(here: Path) -> None:
    good = "import torch\nwith torch.cuda.amp.autocast():\n    pass"
    _notebook(here / "a.ipynb", "%%bash\nls |", "x = 1\ny = (", good, "else:\n    pass")
    result = json.loads(precast_("check", "--output-format", "json").stdout)
    assert [finding["code"] for finding in result] == ["AMP900", "AMP001"]
    assert (result[0]["cell"], result[0]["location"]["row"]) == (2, 2)
    assert "(and 1 more)" in result[0]["message"]
    assert precast_("check", "--fix").exit_code == 1
    assert "torch.amp.autocast" in (here / "a.ipynb").read_text()
    assert precast_("check", "--ignore", "AMP900").exit_code == 0


def test_a_shell_command_may_go_on_in_the_next_lines(here: Path) -> None:
    code = """import torch
!pip install a \\
    --upgrade \\
    b
if x:
    !ls \\
        -l
scaler = torch.cuda.amp.GradScaler()
"""
    _notebook(here / "a.ipynb", code)
    assert "AMP900" not in precast_("check").stdout
    assert precast_("check", "--fix").exit_code == 0
    fixed = json.loads((here / "a.ipynb").read_text())["cells"][0]["source"]
    assert fixed == code.replace("torch.cuda.amp.GradScaler()", 'torch.amp.GradScaler("cuda")')


def test_a_notebook_in_another_language_is_left_alone(here: Path) -> None:
    _notebook(here / "a.ipynb", "x <- torch.cuda.amp.autocast(", language="R")
    assert precast_("check").exit_code == 0


# --- explanations, and the start ---


def test_a_rule_is_explained_by_its_page_and_all_are_listed() -> None:
    page = precast_("check", "--explain", "amp001")
    assert page.exit_code == 0
    assert page.stdout.startswith("# AMP001 cuda-autocast")
    assert precast_("check", "--explain", "cuda-autocast").stdout == page.stdout
    assert "AMP203  error" in precast_("check", "--explain", "ALL").stdout


_START = (
    "import sys; from precast_lint.cli import main; main(['check', {!r}], standalone_mode=False)"
)


# What a run may load before it has to parse: anything else of precast's, and these, cost time.
_HEAVY = {"asyncio", "difflib", "hashlib", "json", "libcst", "multiprocessing", "rich", "torch"}
_LIGHT = {
    "precast_lint",
    "precast_lint.cli",
    "precast_lint.errors",
    "precast_lint.output",
    "precast_lint.output.formats",
    "precast_lint.running",
    "precast_lint.running.files",
    "precast_lint.running.report",
    "precast_lint.running.runner",
    "precast_lint.selecting",
    "precast_lint.selecting.index",
    "precast_lint.selecting.look",
    "precast_lint.selecting.pins",
    "precast_lint.selecting.registry",
    "precast_lint.selecting.settings",
    "precast_lint.torch_versions",
    "precast_lint.version",
}


def _loaded(here: Path, expression: str) -> set[str]:
    code = (
        f"import sys, atexit\natexit.register(lambda: print(*sys.modules, sep=','))\n{expression}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return set(done.stdout.splitlines()[-1].split(","))


def test_check_starts_with_what_it_needs(here: Path) -> None:
    """It starts in less than 0.15 s; a test of that fails on a busy machine, a list of modules does not."""
    (here / "a.py").write_text("import torch\n")
    loaded = _loaded(here, _START.format(str(here)))
    assert {name for name in loaded if name.startswith("precast")} == _LIGHT
    assert not loaded & _HEAVY
    package = _loaded(here, "import precast_lint")
    assert {name for name in package if name.startswith("precast")} == {"precast_lint"}
    assert not package & _HEAVY


def test_only_rules_that_a_file_mentions_are_loaded(here: Path) -> None:
    (here / "a.py").write_text("import torch\ndtype = torch.get_autocast_cpu_dtype()\n")
    rules = "precast_lint.rules."
    start = _START.format(str(here)).replace("'check'", "'check', '--select', 'AMP00,AMP2'")
    loaded = {name for name in _loaded(here, start) if name.startswith(rules + "amp")}
    assert rules + "amp008_state_functions" in loaded
    assert not {name for name in loaded if name.startswith(rules + "amp2")}


# --- options that users of ruff expect ---


def test_what_is_excluded_on_the_command_line_and_by_force(here: Path) -> None:
    (here / "old").mkdir()
    (here / "old" / "b.py").write_text(OLD)
    assert precast_("check").exit_code == 1
    assert precast_("check", "--exclude", "old").exit_code == 0
    (here / "pyproject.toml").write_text('[tool.precast.check]\nexclude = ["old"]\n')
    assert precast_("check").exit_code == 0
    assert precast_("check", "old/b.py").exit_code == 1, "it was named"
    assert precast_("check", "--force-exclude", "old/b.py").exit_code == 0
    assert precast_("check", "--force-exclude", "old").exit_code == 0


def test_isolated_knows_no_pyproject(here: Path) -> None:
    (here / "a.py").write_text(OLD)
    (here / "pyproject.toml").write_text('[tool.precast.check]\nignore = ["AMP0"]\n')
    assert precast_("check").exit_code == 0
    assert precast_("check", "--isolated").exit_code == 1
    assert precast_("check", "--isolated", "--ignore", "AMP0").exit_code == 0


def test_output_goes_into_a_file_on_request(here: Path) -> None:
    (here / "a.py").write_text(OLD)
    done = precast_("check", "--output-format", "json", "-o", "out/found.json")
    assert (done.exit_code, done.stdout) == (1, "")
    [finding] = json.loads((here / "out" / "found.json").read_text())
    assert finding["code"] == "AMP001"
    (here / "a.py").write_text(NEW)
    assert precast_("check", "--output-format", "json", "-o", "out/found.json").exit_code == 0
    assert json.loads((here / "out" / "found.json").read_text()) == []


def test_quiet_says_only_what_was_found(here: Path) -> None:
    (here / "a.py").write_text(OLD)
    loud, quiet = precast_("check").stdout, precast_("check", "-q").stdout
    assert loud == quiet + loud[len(quiet) :]
    assert "Found 1 finding" not in quiet
    assert "AMP001" in quiet
    (here / "a.py").write_text(NEW)
    assert precast_("check", "-q").stdout == ""


def test_fixing_fails_a_run_on_request(here: Path) -> None:
    (here / "a.py").write_text(OLD)
    assert precast_("check", "--fix", "--exit-non-zero-on-fix").exit_code == 1
    assert (here / "a.py").read_text() == NEW
    assert precast_("check", "--fix", "--exit-non-zero-on-fix").exit_code == 0
