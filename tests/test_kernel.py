"""Notebooks as a reader runs them: in JupyterLab's kernel, every cell from top to bottom, from a fresh copy.

Run All knows nothing of `#| slow` and `#| cuda`, so these cells run here too. Two quick notebooks run always; with
`--run-slow` all of them do (`pytest tests/test_kernel.py --run-slow --durations=0` says how long each takes)."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from notebook_checks import ROOT, cell_flags, compare, executed_ids, find_notebooks, split_source

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NBS = ROOT / "nbs"
QUICK = ("40_recipe.ipynb", "44_display.ipynb")
WIDGET = "application/vnd.jupyter.widget-view+json"


def fresh_copy(notebook: Path, folder: Path) -> Path:
    """The notebook in a copy of `nbs/`, which it may write to, beside links to the rest of the project."""
    for entry in ROOT.iterdir():
        if entry.name != "nbs":
            (folder / entry.name).symlink_to(entry)
    shutil.copytree(NBS, folder / "nbs", ignore=shutil.ignore_patterns("_*", ".*"))
    return folder / notebook.relative_to(ROOT)


def run_all(path: Path, timeout: float = 1800):
    """Execute a notebook in place in a kernel of its own; a cell that raises ends it with its traceback."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    client = nbclient.NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=resources)
    client.execute(env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])})
    nbformat.write(notebook, path)
    return notebook


def keep_what_lasts(path: Path, into: Path) -> Path:
    """A copy without progress bars, and without the plain text of what JupyterLab shows as HTML: pandas breaks it to the
    width of a terminal."""
    notebook = nbformat.read(path, as_version=4)
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
        for data in (output.data for output in cell.outputs if "text/html" in output.get("data", {})):
            data.pop("text/plain", None)
    nbformat.write(notebook, into)
    return into


def comparable(path: Path) -> set[str]:
    """Ids of the cells in front of the first one that the tests of notebooks leave out: later ones show what it made."""
    ran, kept = executed_ids(path, cell_flags()), set()
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code" and split_source(cell)[0] & {"eval", *cell_flags()}:
            break
        kept |= {cell["id"]} & ran
    return kept


def check(notebook: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kernel-") as folder:
        copy = fresh_copy(notebook, Path(folder))
        executed = run_all(copy)
        shown = [output for cell in executed.cells for output in cell.get("outputs", [])]
        assert not [output["ename"] for output in shown if output["output_type"] == "error"]
        assert all(cell.execution_count for cell in executed.cells if cell.cell_type == "code" and cell.source.strip())
        lasting = (keep_what_lasts(path, Path(folder) / name) for path, name in ((notebook, "old"), (copy, "new")))
        faults = compare(*lasting, comparable(notebook))
        assert not faults, "\n\n".join(faults)


@pytest.mark.parametrize("name", QUICK)
def test_run_all(name):
    check(NBS / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [str(path.relative_to(NBS)) for path in find_notebooks(NBS) if path.name not in QUICK])
def test_run_all_of_every_other_notebook(name):
    check(NBS / name)
