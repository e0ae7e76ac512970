"""Tests: every notebook in `nbs/` gives two items: its form, and its execution with a comparison of its outputs.

`pytest nbs/data/10_examples.ipynb` runs one notebook and `-k` selects by name. `--thorough` adds what CI also runs (many
processes, killed ones, a browser on every page); `--run-slow` adds what is marked slow. `-n 0` runs everything in one
process instead of one per core (four at most). `--without-bfloat16` simulates a processor without bfloat16 products.
"""

import os
import tempfile
from pathlib import Path

import pytest
from notebook_checks import (
    ROOT,
    cell_flags,
    check,
    find_notebooks,
    lint,
    set_environment,
    stop_all,
)

NBS = ROOT / "nbs"

# Notebooks whose execution is thorough: seconds on two cores without bfloat16, 2026-11-24. Their
# form is always checked, and `pytest nbs/embed/64_mining.ipynb` executes one that it names.
THOROUGH_NOTEBOOKS = {
    "data/20_docstrings": 6,
    "embed/30_reading": 17,
    "embed/35_onnx": 15,
    "embed/60_corpus": 21,
    "embed/64_mining": 22,
    "embed/67_index": 34,
    "evaluate/30_tasks": 17,
    "evaluate/32_prompts": 8,
    "evaluate/35_local_tasks": 12,
    "evaluate/36_encoder": 7,
    "evaluate/40_benchmark": 12,
    "evaluate/45_sweep": 8,
    "experiments/multi_gpu": 28,
    "experiments/rivals": 31,
    "experiments/small_world": 40,
    "experiments/test_time_scaling": 6,
    "experiments/vector_indexes": 8,
    "guide/3_own_pairs": 18,
    "model/55_loading": 26,
    "model/70_ranks": 8,
    "objectives/30_contrasted_reconstruction": 29,
    "objectives/31_distilled_reconstruction": 9,
    "serving": 19,
    "study/55_steps": 10,
    "study/60_tournament": 25,
    "study/62_calibration": 10,
    "study/70_bench": 12,
    "train/18_cost": 30,
    "train/20_plan": 10,
    "train/30_runs": 20,
    "train/50_launch": 34,
}


def pytest_addoption(parser):
    group = parser.getgroup("notebooks")
    group.addoption(
        "--thorough",
        action="store_true",
        help="also run the tests marked thorough, as CI does",
    )
    group.addoption(
        "--run-slow",
        action="store_true",
        help="also run the tests marked thorough or slow, and the cells flagged `#| slow`",
    )
    group.addoption(
        "--without-bfloat16",
        action="store_true",
        help="run as on a processor without bfloat16 products",
    )
    group.addoption(
        "--notebook-timeout",
        type=float,
        default=None,
        help="seconds that a notebook may take (default: 300, or 3600 with --run-slow)",
    )


def pytest_configure(config):
    if config.option.without_bfloat16:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"  # the processes of the tests inherit it
    config.addinivalue_line(
        "markers", "thorough: many processes, or tens of seconds; runs with --thorough"
    )
    config.addinivalue_line("markers", "slow: minutes long; runs with --run-slow")
    config.addinivalue_line("markers", "cuda: needs a CUDA device")
    if not find_notebooks(NBS):
        raise pytest.UsageError(f"no notebook was found in {NBS}")
    scratch = tempfile.TemporaryDirectory(prefix="anchor-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(scratch.cleanup)
    set_environment(Path(scratch.name))


# ---- notebooks as items


def pytest_collect_file(file_path: Path, parent):
    if file_path.suffix == ".ipynb" and file_path in find_notebooks(NBS):
        return NotebookFile.from_parent(parent, path=file_path)
    return None


class NotebookFile(pytest.File):
    def collect(self):
        yield FormItem.from_parent(self, name="form")
        execution = ExecuteItem.from_parent(self, name="execute")
        if self.room in THOROUGH_NOTEBOOKS and self.path not in named_paths(self.config):
            execution.add_marker(pytest.mark.thorough)
        yield execution

    @property
    def room(self) -> str:
        return self.path.relative_to(NBS).with_suffix("").as_posix()


def named_paths(config) -> set[Path]:
    """The files that the command line names."""
    folder = config.invocation_params.dir
    return {(folder / word.split("::")[0]).resolve() for word in config.args}


class NotebookFault(Exception):
    """The faults of a notebook, as text."""


class NotebookItem(pytest.Item):
    def repr_failure(self, excinfo, style=None):
        return (
            str(excinfo.value)
            if isinstance(excinfo.value, NotebookFault)
            else super().repr_failure(excinfo, style)
        )

    def reportinfo(self):
        return self.path, 0, f"{self.path.relative_to(ROOT)} {self.name}"


class FormItem(NotebookItem):
    """Imports in their own cells, a title, small outputs without local paths."""

    def runtest(self):
        faults = lint(self.path, pictures=4 if self.path.parent.name == "experiments" else 1)
        if faults:
            raise NotebookFault("\n".join(faults))


class ExecuteItem(NotebookItem):
    """Executes a copy; every output must equal the committed one."""

    def runtest(self):
        option = self.config.option
        timeout = option.notebook_timeout or (3600 if option.run_slow else 300)
        wanted = {"slow": option.run_slow, "cuda": has_cuda()}
        skip = [flag for flag in cell_flags() if not wanted.get(flag)]
        run = check(self.path, skip, timeout)
        if not run.ok:
            raise NotebookFault("\n\n".join([*run.faults, run.log.strip()[-8000:]]).strip())
        if run.log.strip():
            print(run.log)


def pytest_sessionfinish():
    stop_all()


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


# ---- selection


def pytest_collection_modifyitems(config, items):
    thorough = config.option.thorough or config.option.run_slow
    for item in items:
        if item.get_closest_marker("thorough") and not thorough:
            item.add_marker(pytest.mark.skip(reason="thorough: runs with --thorough"))
        if item.get_closest_marker("slow") and not config.option.run_slow:
            item.add_marker(pytest.mark.skip(reason="slow: runs with --run-slow"))
        if item.get_closest_marker("cuda") and not has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
