"""The checks of the notebooks find the faults that they are for."""

import base64
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from notebook_checks import ROOT, check, compare_cell, find_notebooks, lint, same_text
from PIL import Image, ImageDraw


def markdown(source):
    return {"cell_type": "markdown", "source": source, "metadata": {}}


def code(source, *outputs):
    return {
        "cell_type": "code",
        "source": source,
        "outputs": list(outputs),
        "metadata": {},
        "execution_count": None,
    }


def printed(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def shown(**data):
    return {
        "output_type": "display_data",
        "data": {key.replace("_", "/"): v for key, v in data.items()},
        "metadata": {},
    }


TITLE = markdown("# tiny\n\n> One line of what it does.")


@pytest.fixture
def notebook(tmp_path):
    """A project of one notebook; calling it writes these cells after a title."""
    project = tmp_path / "project"
    (project / "nbs" / "results").mkdir(parents=True)
    (project / "nbs" / "results" / "figures.json").write_text("[1, 2]")
    (project / "pyproject.toml").write_text(
        '[project]\nname = "x"\n[tool.nbdev]\ntst_flags = "slow cuda"\n'
    )

    def write(*cells, title=TITLE):
        path = project / "nbs" / "00_tiny.ipynb"
        cells = [cell | {"id": f"cell{i}"} for i, cell in enumerate((title, *cells))]
        document = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        path.write_text(json.dumps(document), encoding="utf-8")
        return path

    return write


def run(path, skip=("slow", "cuda"), timeout=60):
    return check(path, list(skip), timeout, root=path.parent.parent)


# ---- comparison


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("loss 1.2345, 12 texts", "loss 1.2346, 12 texts", True),
        ("loss 1.2345", "loss 1.2445", False),
        ("0.1234, 5.4321", "0.1235, 5.4326", True),
        ("65536 tokens", "65599 tokens", False),
        ("12,345 tokens", "12,346 tokens", False),
        ("loss 1.23456", "loss 1.23567", False),
        ("loss 0.54", "loss 0.55", False),
        ("learning rate 2e-07", "learning rate 3e-07", False),
        ("learning rate 2.5e-07", "learning rate 0.0", False),
        ("2e-8 left", "-3e-8 left", False),
        ("a   1.0", "a 1.0", True),
        ("1.0 nats", "1.0 bits", False),
        ("(3, 4)", "(3, 4, 5)", False),
        ("[1.0, nan]", "[1.0, nan]", True),
        ("[1.0, nan]", "[1.0, 2.0]", False),
    ],
)
def test_whole_numbers_and_words_are_exact_and_others_relative_to_themselves(old, new, same):
    assert same_text(old, new) is same


def drawn(width=640, height=480, line=0, dots=0):
    "A plot as PNG: an axis, a line that falls by `line` pixels, and a few black dots."
    picture = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(picture)
    pen.rectangle((60, 40, width - 40, height - 60), outline="black")
    pen.line((60, 100, width - 40, 100 + line), fill="#2a5b94", width=3)
    for dot in range(dots):
        pen.point((100 + 7 * dot, 300), fill="black")
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def test_pictures_are_compared_by_size_and_coarse_look():
    old = code("plot()", shown(image_png=drawn(), text_plain="<Figure>"))

    def difference(**changes):
        return compare_cell(
            old, code("plot()", shown(image_png=drawn(**changes), text_plain="<Figure>"))
        )

    assert difference() == difference(dots=5) == ""
    assert "-(640 × 480 pixels" in difference(width=641)
    assert "+(640 × 480 pixels" in difference(line=250)
    assert "-<image/png>" in compare_cell(old, code("plot()", shown(text_plain="<Figure>")))


def test_a_picture_of_one_pixel_is_not_the_plot():
    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "PNG")
    pixel = base64.b64encode(file.getvalue()).decode()
    old = code("plot()", shown(image_png=drawn()))
    assert "+(1 × 1 pixels" in compare_cell(old, code("plot()", shown(image_png=pixel)))


def test_printed_parts_are_joined_and_stderr_and_addresses_ignored():
    old = code("f()", printed("a\nb <f at 0x12ab>\n"))
    assert (
        compare_cell(
            old, code("f()", printed("a\n"), printed("warned", "stderr"), printed("b <f>\n"))
        )
        == ""
    )
    text = printed("a")
    value = shown(text_plain="1")
    assert compare_cell(code("f()", text, value), code("f()", value, text)) == ""


# ---- form


def test_a_notebook_of_good_form_has_no_faults(notebook):
    cells = [
        code("#| default_exp tiny"),
        code("#| export\nimport json"),
        code('#| export\ndef f(x):\n    "Twice."\n    return 2 * x'),
        code("f(2)", shown(text_plain="4")),
        code("#| slow\nf(3)"),
    ]
    assert lint(notebook(*cells)) == []


@pytest.mark.parametrize(
    ("cell", "fault"),
    [
        (code("import json\nx = 1"), "imports must be alone"),
        (code("def f():\n    import json\nf()"), "imports must be alone"),
        (code("#| cuda\nf()", printed("1\n")), "although it is not executed"),
        (code("#| eval: false\nf()", printed("1\n")), "although it is not executed"),
        (code("f()", printed(f"in {Path('/home') / 'someone'}\n")), "a path of one machine"),
        (code("f()", printed("x" * 20_001)), "an output of 20,001 characters"),
        (code("f()", printed("careful", "stderr")), "stderr"),
        (
            code("f()", {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}),
            "an error is committed",
        ),
        (code("f()", shown(image_png="A"), shown(image_png="B")), "2 pictures (limit 1)"),
    ],
)
def test_faults_of_form_are_named(notebook, cell, fault):
    faults = lint(notebook(cell))
    assert len(faults) == 1 and fault in faults[0]


def test_the_first_cell_is_a_title_with_a_line_of_what_it_does(notebook):
    assert "first cell" in lint(notebook(title=markdown("# tiny")))[0]


def test_hidden_and_generated_folders_hold_no_notebooks(notebook):
    path = notebook()
    for folder in ("_proc", ".ipynb_checkpoints", "experiments"):
        (path.parent / folder).mkdir()
        (path.parent / folder / "x.ipynb").write_text("{}")
    assert [p.name for p in find_notebooks(path.parent)] == ["00_tiny.ipynb", "x.ipynb"]


# ---- execution


def test_a_notebook_that_tells_the_truth_passes_and_leaves_nothing_behind(notebook):
    cells = [
        code("import json\nfrom pathlib import Path"),
        code(
            'print(sum(json.loads(Path("results/figures.json").read_text())) / 7)',
            printed("0.42857\n"),
        ),
        code('Path("stray").write_text("x");'),
        code("#| slow\nraise ValueError"),
    ]
    path = notebook(*cells)
    before = path.read_bytes()
    assert run(path).faults == []
    assert path.read_bytes() == before
    assert {p.name for p in path.parent.iterdir()} == {"00_tiny.ipynb", "results"}
    assert not run(path, skip=["cuda"]).ok


def test_an_old_output_fails_with_a_difference(notebook):
    result = run(notebook(code("1 + 1", shown(text_plain="3"))))
    assert not result.ok
    assert "-3" in result.faults[0] and "+2" in result.faults[0]
    result = run(notebook(code("x = 1", printed("left over\n"))))
    assert "-left over" in result.faults[0]


def test_an_error_fails_with_its_traceback(notebook):
    result = run(notebook(code('raise ValueError("broken here")')))
    assert not result.ok
    assert "broken here" in result.log


@pytest.mark.thorough
def test_a_notebook_that_hangs_is_stopped_with_its_children(notebook):
    cells = [
        code("import subprocess\nimport time"),
        code('p = subprocess.Popen(["sleep", "77"])\ntime.sleep(77)'),
    ]
    result = run(notebook(*cells), timeout=4)
    assert result.faults == ["stopped at its time limit of 4 s"]
    assert "time.sleep(77)" in result.log  # the stack of the cell that hangs is shown


# ---- selection


def test_a_thorough_notebook_is_skipped_unless_it_is_named():
    """In a folder it is skipped, and its form is checked all the same."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "nbs/embed", "-k", "reading"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "1 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    named = subprocess.run(
        [*command, "nbs/embed/30_reading.ipynb", "--setup-plan"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert named.returncode == 0 and "skipped" not in named.stdout, named.stdout + named.stderr
