"""Notebooks as a reader runs them: in JupyterLab's kernel, every cell from top to bottom, from a fresh copy.

Run All does not know `#| slow` and `#| cuda`, so these cells run here too. Two quick notebooks always run; `--run-slow`
runs them all (`pytest tests/test_kernel.py --run-slow --durations=0` shows how long each takes)."""

import json
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import nbclient
import nbformat
import pytest
from notebook_checks import ROOT, cell_flags, compare, executed_ids, find_notebooks, split_source

NBS = ROOT / "nbs"
pytestmark = pytest.mark.thorough
QUICK = ("study/30_pictures.ipynb", "look_inside.ipynb")
WIDGET = "application/vnd.jupyter.widget-view+json"


def fresh_copy(notebook: Path, folder: Path) -> Path:
    """The notebook in a copy of `nbs/`, which it may write to, beside links to the rest of the
    project.
    """
    for entry in ROOT.iterdir():
        if entry.name != "nbs":
            (folder / entry.name).symlink_to(entry)
    shutil.copytree(NBS, folder / "nbs", ignore=shutil.ignore_patterns("_*", ".*"))
    return folder / notebook.relative_to(ROOT)


class Client(nbclient.NotebookClient):
    """Counts how often each updatable display was drawn, and remembers the cells that have one."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.drawn = Counter()
        self.live = set()

    def process_message(self, msg, cell, cell_index):
        if place := msg["content"].get("transient", {}).get("display_id"):
            self.drawn[place] += 1
            self.live |= {cell.id}
        return super().process_message(msg, cell, cell_index)


def run_all(path: Path, timeout: float = 1800) -> Client:
    """Executes a notebook in place in a new kernel; if a cell raises, the execution ends with its
    traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    client = Client(notebook, timeout=timeout, kernel_name="python3", resources=resources)
    client.execute(
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    )
    nbformat.write(notebook, path)
    return client


def keep_what_lasts(path: Path, into: Path) -> Path:
    """A copy without progress bars, and without the plain text of what JupyterLab shows as HTML,
    because pandas breaks it at the width of a terminal.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
        for data in (
            output.data for output in cell.outputs if "text/html" in output.get("data", {})
        ):
            data.pop("text/plain", None)
    nbformat.write(notebook, into)
    return into


def comparable(path: Path) -> set[str]:
    """Ids of the cells before the first one that the tests of notebooks leave out; later ones show
    its results.
    """
    ran = executed_ids(path, cell_flags())
    kept = set()
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code" and split_source(cell)[0] & {"eval", *cell_flags()}:
            break
        kept |= {cell["id"]} & ran
    return kept


def check(notebook: Path) -> Client:
    with tempfile.TemporaryDirectory(prefix="kernel-") as folder:
        copy = fresh_copy(notebook, Path(folder))
        client = run_all(copy)
        cells = [
            cell for cell in client.nb.cells if cell.cell_type == "code" and cell.source.strip()
        ]
        assert all(cell.execution_count for cell in cells)
        assert not [
            output["ename"]
            for cell in cells
            for output in cell.outputs
            if output["output_type"] == "error"
        ]
        lasting = (
            keep_what_lasts(path, Path(folder) / name)
            for path, name in ((notebook, "old"), (copy, "new"))
        )
        # live outputs differ elsewhere
        faults = compare(*lasting, comparable(notebook) - client.live)
        assert not faults, "\n\n".join(faults)
        return client


@pytest.mark.parametrize("name", QUICK)
def test_run_all(name):
    check(NBS / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    sorted({str(path.relative_to(NBS)) for path in find_notebooks(NBS)} - set(QUICK)),
)
def test_run_all_of_every_other_notebook(name):
    check(NBS / name)


# ---- displays that move

LIVE = """
import tempfile
from pathlib import Path
from anchor_embedding.data.examples import Example
from anchor_embedding.common.show import LossCurve
from anchor_embedding.train.recipe import Recipe
from anchor_embedding.train.runs import read_log
from anchor_embedding.common.tiny import PROSE, tiny_model, tiny_tokenizer
from anchor_embedding.train.stage import train
folder, words = Path(tempfile.mkdtemp()), PROSE.split()
tiny_model("llama").save_pretrained(folder / "base")
tiny_tokenizer("smollm2").save_pretrained(folder / "base")
pairs = [Example(" ".join(words[i : i + 3]), " ".join(words[i + 3 : i + 9])) for i in range(0, 60, 3)]
recipe = Recipe(name="live", objective="contrastive", base=str(folder / "base"), data="-", steps=6, batch_size=5,
                warmup_steps=0, learning_rate=1e-2, max_length=40, dtype="float32", checkpoint_every=0)
"""
TRAIN = """
with LossCurve(seconds=0) as curve:
    train(recipe, folder / "run", pairs, progress=False, say=lambda text: None, on_step=curve)
"""
LAST = 'print(json.dumps(read_log(folder / "run" / "metrics.jsonl")))'
SEARCH = """
from anchor_embedding.embed.embedder import Embedder
from anchor_embedding.study.search_box import search_box
widget = search_box(Embedder.from_pretrained(folder / "run" / "final"), [pair.positive for pair in pairs] + ["<i>a & b</i>"], top=2)
box, shown = widget.children
for query in ("<i>a & b</i>", " "):
    box.value = query
    print(shown.value)
"""
HIDDEN = 'import sys\nsys.modules["ipywidgets"] = None'  # as if ipywidgets were not installed


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A notebook that trains with a live curve in a kernel without ipywidgets, and then searches
    with it.
    """
    path = tmp_path_factory.mktemp("live") / "live.ipynb"
    sources = [HIDDEN, "import json" + LIVE, TRAIN, LAST, 'del sys.modules["ipywidgets"]', SEARCH]
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources]),
        path,
    )
    client = run_all(path)
    return client, [cell.outputs for cell in client.nb.cells]


def test_loss_curve_is_drawn_again_in_its_place(live):
    client, outputs = live
    rows = json.loads(outputs[3][0]["text"])
    assert len(rows) == 6 and rows[-1]["loss"] != rows[0]["loss"]
    pictures = [
        output["data"]
        for output in outputs[2]
        if "<svg" in output.get("data", {}).get("text/html", "")
    ]
    assert len(pictures) == 1 and list(client.drawn.values()) == [6]
    first, last = (f"{row['loss']:.4g} at step {row['step']}" for row in (rows[0], rows[-1]))
    assert pictures[0]["text/plain"] == f"loss: {first}, {last}"
    assert f">{rows[-1]['loss']:.3g}</text>" in pictures[0]["text/html"]


def test_search_box_answers_and_escapes(live):
    shown = "".join(output["text"] for output in live[1][5] if output.get("name") == "stdout")
    found, hint = shown.strip().split("\n")
    assert "<b>1.000</b> &lt;i&gt;a &amp; b&lt;/i&gt;" in found and found.count("<li") == 2
    assert hint == "<p>21 texts: type a query and press Enter</p>"
