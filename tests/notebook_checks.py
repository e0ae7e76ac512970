"""Runs a copy of a notebook and compares its outputs with the committed ones; knows nothing about pytest.

nbdev and IPython are imported only where they are used, so that the collection of tests stays quick."""

import ast
import base64
import difflib
import io
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import tomllib
import zlib
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from PIL import Image, ImageChops

ROOT = Path(__file__).resolve().parent.parent
OUTPUT_LIMIT = 20_000  # characters of one output, pictures apart


def set_environment(scratch: Path) -> None:
    """The environment of the tests and all their processes: one thread, no model hub, a fixed
    width, a cache in `scratch` (unless the user names one) and an IPython folder without a user's
    profile.
    """
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "ANCHOR_CACHE": str(scratch / "cache"),
    }.items():
        os.environ.setdefault(name, value)
    os.environ.update(IPYTHONDIR=str(scratch / "ipython"), COLUMNS="80")


def find_notebooks(folder: Path) -> list[Path]:
    """Every notebook in `folder` and its subfolders, in order, without hidden, generated and
    checkpoint folders.
    """
    found = (
        p
        for p in folder.rglob("*.ipynb")
        if not any(part[0] in "._" for part in p.relative_to(folder).parts)
    )
    return sorted(found)


def cell_flags() -> list[str]:
    """The directives (`tst_flags` of pyproject.toml) of cells that run only on request."""
    flags = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["nbdev"][
        "tst_flags"
    ]
    return flags.split() if isinstance(flags, str) else list(flags)


# ---- cells


def read_cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def joined(text) -> str:
    return text if isinstance(text, str) else "".join(text)


def split_source(cell: dict) -> tuple[set[str], list[str]]:
    """The names of a cell's `#|` directives, and its other lines."""
    lines = joined(cell["source"]).splitlines()
    marks = [re.match(r"\s*#\s?\|\s*([\w-]+)", line) for line in lines]
    return {m[1] for m in marks if m}, [line for line, m in zip(lines, marks, strict=True) if not m]


def where(number: int, cell: dict) -> str:
    """The name of a cell in a message: its number, its id and its first line."""
    body = next((line.strip() for line in split_source(cell)[1] if line.strip()), "(empty)")
    return f"cell {number} [{cell.get('id', '-')}] {body[:70]}"


def executed_ids(path: Path, skip: list[str]) -> set[str]:
    """Ids of the cells that nbdev runs when cells with a flag in `skip` are left out."""
    from nbdev.test import nb_test_cells

    return {cell.id for cell in nb_test_cells(path, skip_flags=skip)}


# ---- lint


def is_picture(mime: str) -> bool:
    return mime.startswith("image/")


def machine_paths() -> re.Pattern:
    """A pattern for absolute paths of one machine: common home and scratch folders, and those of
    this machine.
    """
    usual = r"/(?:home|Users|root|tmp|private|mnt)/[\w.-]+|[A-Z]:\\Users\\"
    here = {str(ROOT), str(Path.home()), tempfile.gettempdir(), sys.prefix} - {"/"}
    named = "|".join(re.escape(path) for path in sorted(here))
    return re.compile(rf"(?<![\w.])(?:{usual}|(?:{named})(?![\w.-]))")


def mixes_imports(lines: list[str], exported: bool) -> bool:
    """Whether a cell has an import beside other code. Building the documentation runs every cell
    that contains an import.
    """
    code = "\n".join("" if line.lstrip().startswith(("%", "!", "?")) else line for line in lines)
    body = [
        n
        for n in ast.parse(code).body
        if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
    ]
    imports = [isinstance(n, ast.Import | ast.ImportFrom) for n in body]
    if any(imports):
        return not all(imports)
    return not exported and any(
        isinstance(n, ast.Import | ast.ImportFrom) for top in body for n in ast.walk(top)
    )


def lint_output(output: dict, paths: re.Pattern) -> list[str]:
    if output["output_type"] == "error":
        return ["an error is committed as its output"]
    if output.get("name") == "stderr":
        return [
            "output on stderr is committed (warnings and progress bars differ from machine to "
            "machine)"
        ]
    data = (
        {"text/plain": output["text"]}
        if output["output_type"] == "stream"
        else output.get("data", {})
    )
    texts = [
        joined(v) if isinstance(v, str | list) else json.dumps(v)
        for k, v in data.items()
        if not is_picture(k)
    ]
    faults = [
        f"an output of {len(t):,} characters (limit {OUTPUT_LIMIT:,})"
        for t in texts
        if len(t) > OUTPUT_LIMIT
    ]
    return faults + [
        f"a path of one machine in its output: {m[0]}" for t in texts if (m := paths.search(t))
    ]


def lint_cell(cell: dict, executed: bool, paths: re.Pattern) -> list[str]:
    directives, lines = split_source(cell)
    exported = bool(directives & {"export", "exports", "exporti"})
    faults = []
    if mixes_imports(lines, exported):
        faults.append("imports must be alone in a cell")
    if cell["outputs"] and not executed:
        faults.append("has committed outputs although it is not executed by the tests")
    return faults + [fault for output in cell["outputs"] for fault in lint_output(output, paths)]


def lint(path: Path, pictures: int = 1) -> list[str]:
    """The faults in the form of a notebook, one line per fault; an empty list if there are none."""
    cells = read_cells(path)
    faults = []
    paths = machine_paths()
    executed = executed_ids(path, cell_flags())
    title = joined(cells[0]["source"]) if cells and cells[0]["cell_type"] == "markdown" else ""
    if not re.match(r"(?s)(---\n.*?\n---\n+)?# \S[^\n]*\n.*?^> \S", title, re.MULTILINE):
        faults.append(
            "the first cell must be markdown: a line `# title` and a line `> what it does`"
        )
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            found = lint_cell(cell, cell.get("id") in executed, paths)
            faults += [f"{where(number, cell)}: {fault}" for fault in found]
    outputs = [o for cell in cells for o in cell.get("outputs", [])]
    shown = sum(any(map(is_picture, o.get("data", {}))) for o in outputs)
    if shown > pictures:
        faults.append(f"{shown} pictures (limit {pictures})")
    return faults


# ---- comparison

NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")
WHOLE = re.compile(r"[-+]?\d+")
BITMAPS = ("image/png", "image/jpeg")
GRID = (32, 32)  # size of the grid on which the brightness of two pictures is compared


def same_number(old: str, new: str, rtol: float = 3e-4) -> bool:
    """Whole numbers must be equal. Others must be close relative to their size, or differ by one
    unit in the last digit shown if that is at most a thousandth of them.
    """
    first = float(old)
    second = float(new)
    if old == new or first == second:
        return True
    if WHOLE.fullmatch(old) or WHOLE.fullmatch(new):
        return False
    unit = max(10.0 ** Decimal(text).as_tuple().exponent for text in (old, new))
    rounding = 1.01 * unit / max(abs(first), abs(second))
    return math.isclose(first, second, rel_tol=max(rtol, rounding if rounding <= 1e-3 else 0))


def same_text(old: str, new: str) -> bool:
    """The words must be equal and the numbers pass `same_number`; the amount of white space between
    them does not matter.
    """
    old_parts, new_parts = (NUMBER.split(re.sub(r"[ \t]+", " ", text)) for text in (old, new))
    if old_parts[::2] != new_parts[::2]:
        return False
    return all(map(same_number, old_parts[1::2], new_parts[1::2]))


def picture_of(encoded: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(encoded)))


def same_picture(old: str, new: str, tolerance: int = 6) -> bool:
    """The size must be equal, and the brightness (of 255) nearly the same in each field of a coarse
    grid.
    """
    first = picture_of(old)
    second = picture_of(new)
    if first.size != second.size:
        return False
    coarse = (
        picture.convert("RGBA").convert("L").resize(GRID, Image.Resampling.BOX)
        for picture in (first, second)
    )
    _, most = ImageChops.difference(*coarse).getextrema()
    return most <= tolerance


def same_part(kind: str, old: str, new: str) -> bool:
    return same_picture(old, new) if kind in BITMAPS else same_text(old, new)


def described(kind: str, text: str) -> list[str]:
    "The lines of an output that are shown in a difference."
    if kind not in BITMAPS:
        return [f"<{kind}>", *text.splitlines()]
    width, height = picture_of(text).size
    return [f"<{kind}>", f"({width} × {height} pixels, checksum {zlib.crc32(text.encode()):08x})"]


def shown_parts(cell: dict) -> list[tuple[str, str]]:
    """A cell's outputs as (kind, text): all printed text first, in one piece (JupyterLab keeps its place among the
    displayed ones, nbdev does not); stderr is left out."""
    outputs = cell.get("outputs", [])
    streams = [o for o in outputs if o["output_type"] == "stream" and o["name"] == "stdout"]
    parts = [("printed", "".join(joined(o["text"]) for o in streams))] if streams else []
    for output in outputs:
        if output["output_type"] == "stream":
            continue
        if output["output_type"] == "error":
            parts.append(("error", output["ename"]))
        else:
            for mime, value in sorted(output["data"].items()):
                text = (
                    joined(value)
                    if isinstance(value, str | list)
                    else json.dumps(value, sort_keys=True)
                )
                parts.append((mime, text))
    return [(kind, re.sub(r" at 0x[0-9a-fA-F]+>", ">", text).strip()) for kind, text in parts]


def compare_cell(old: dict, new: dict) -> str:
    """A readable difference between the outputs of two versions of a cell; empty when they agree."""
    before = shown_parts(old)
    after = shown_parts(new)
    same = [kind for kind, _ in before] == [kind for kind, _ in after]
    if same and all(same_part(*a, b) for a, (_, b) in zip(before, after, strict=True)):
        return ""
    lines = (
        [line for kind, text in parts for line in described(kind, text)]
        for parts in (before, after)
    )
    return "\n".join(difflib.unified_diff(*lines, "committed", "executed now", lineterm="", n=2))


def compare(committed: Path, executed: Path, ran: set[str]) -> list[str]:
    """The differences between the outputs of two copies of a notebook, in the cells whose ids are
    in `ran`.
    """
    old = read_cells(committed)
    new = read_cells(executed)
    faults = []
    for number, (a, b) in enumerate(zip(old, new, strict=True)):
        if a["cell_type"] == "code" and a.get("id") in ran and (difference := compare_cell(a, b)):
            faults.append(f"{where(number, a)}\n{difference}")
    return faults


# ---- execution


@dataclass
class Run:
    """How the execution of a notebook ended."""

    ok: bool
    faults: list[str]
    log: str


def mirror(notebook: Path, into: Path, root: Path = ROOT) -> Path:
    """A copy of `notebook` in a folder whose other entries are links to the project's: relative paths work as in
    the original, and files that the notebook writes beside itself stay out of the project."""
    source = root
    target = into
    for part in (*notebook.relative_to(root).parts, None):
        if part is None:
            target.write_bytes(source.read_bytes())
            break
        target.mkdir(exist_ok=True)
        for entry in source.iterdir():
            if entry.name != part:
                (target / entry.name).symlink_to(entry)
        source = source / part
        target = target / part
    return target


def _child(path: str, skip: list[str], log: str) -> None:
    """In the process of the notebook: executes it and writes its outputs back into the copy."""
    os.setsid()  # a separate process group, so that a time limit ends its children too
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.__stderr__ = sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8")
    from nbdev.test import test_nb

    ok, _ = test_nb(path, skip_flags=skip, do_print=False, save=True, profile=False)
    sys.stderr.flush()
    os._exit(0 if ok else 1)


def _context():
    """Processes are forked from a server that has done the slow imports already."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch",
            "transformers",
            "nbdev.test",
            "matplotlib.pyplot",
            "pandas",
            "peft",
            "scipy.stats",
        ]
    )
    return context


def _end(process, number: int) -> None:
    """Signals a notebook's process and its children, or only the process if it has no group of its
    own yet.
    """
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        process.kill()


RUNNING: set = set()


def stop_all() -> None:
    """Ends the notebooks that still run when no test waits for them any more."""
    for process in list(RUNNING):
        _end(process, signal.SIGKILL)


def execute(path: Path, skip: list[str], log: Path, timeout: float) -> str:
    """Runs the notebook in place in a separate process; returns the error, or an empty string."""
    process = _context().Process(target=_child, args=(str(path), skip, str(log)))
    process.start()
    RUNNING.add(process)
    process.join(timeout)
    if process.is_alive():
        _end(process, signal.SIGINT)  # nbdev prints the stack of the cell that hangs
        process.join(5)
        _end(process, signal.SIGKILL)
        process.join()
        RUNNING.discard(process)
        return f"stopped at its time limit of {timeout:g} s"
    RUNNING.discard(process)
    return "" if process.exitcode == 0 else f"failed (exit code {process.exitcode})"


def check(notebook: Path, skip: list[str], timeout: float, root: Path = ROOT) -> Run:
    """Executes a copy of `notebook` without the cells that have a flag in `skip`, and compares its outputs with the
    committed ones. Cells with any test flag have no outputs to compare."""
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        copy = mirror(notebook, Path(folder) / "project", root)
        log = Path(folder) / "log"
        fault = execute(copy, skip, log, timeout)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if fault:
            return Run(False, [fault], text)
        ran = executed_ids(notebook, cell_flags())
        faults = compare(notebook, copy, ran)
        return Run(not faults, faults, text)
