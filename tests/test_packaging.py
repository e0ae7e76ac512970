"""The package as users get it: consistent metadata, a complete wheel, and a fast import."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from notebook_checks import ROOT, find_notebooks

PACKAGE = ROOT / "anchor_embedding"
HEAVY = ["torch", "transformers", "pandas", "matplotlib"]
BUILD_FILES = [
    "pyproject.toml",
    "settings.ini",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "constraints.txt",
]
NOT_NEEDED = ["nbdev", "fastcore", "execnb", "mteb", "datasets", "sentence_transformers"]


def settings():
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return parser["DEFAULT"]


def entries(key):
    return [line for line in settings()[key].splitlines() if line]


def python(code, *arguments):
    """Runs `code` in a new interpreter that finds this tree's package; returns its standard output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
def test_a_clone_does_not_hide_the_package(tmp_path):
    """In the folder above a clone, the clone's own name is that of the package."""
    (tmp_path / "anchor_embedding" / "nbs").mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", "from anchor_embedding import Embedder; print(Embedder.__name__)"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.strip() == "Embedder", done.stderr


# ---- metadata


def test_pyproject_agrees_with_settings():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["name"] == settings()["name"]
    assert project["project"]["requires-python"] == f">={settings()['min_python']}"
    assert project["tool"]["nbdev"]["lib_path"] == settings()["lib_path"] == PACKAGE.name


def test_constraints_cover_the_requirements():
    """Every requirement has an exact version in the constraints; none is tied to a build or a
    location.
    """
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        if line and line[0] != "#"
    ]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    exact = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    names = {
        re.match(r"[\w.-]+", line)[0]
        for line in entries("requirements") + entries("dev_requirements")
    }
    assert names - exact == set()


def test_version_is_the_same_everywhere():
    written = re.search(
        r'^__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text("utf-8"), re.MULTILINE
    )[1]
    assert python("import anchor_embedding; print(anchor_embedding.__version__)").strip() == written


# ---- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built in a separate folder, from the files that packaging needs."""
    if find_spec("build") is None or find_spec("setuptools") is None:
        pytest.skip("needs build and setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in [*BUILD_FILES, *package_files()]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        folder,
        source,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def package_files():
    files = [
        path for path in PACKAGE.rglob("*") if path.is_file() and path.parent.name != "__pycache__"
    ]
    return [path.relative_to(ROOT).as_posix() for path in files]


def test_wheel_holds_every_module_and_resource(wheel):
    packed = {name for name in wheel.namelist() if name.startswith("anchor_embedding/")}
    assert packed == set(package_files())
    assert {name.split("/")[0] for name in wheel.namelist()} == {
        "anchor_embedding",
        info_folder(wheel),
    }
    assert any(name.endswith("LICENSE") for name in wheel.namelist())


def info_folder(wheel):
    return next(name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name)


def test_wheel_metadata(wheel):
    info = info_folder(wheel)
    data = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert (data["Name"], data["License-Expression"]) == (settings()["name"], settings()["license"])
    assert data["Requires-Python"] == f">={settings()['min_python']}"
    assert set(data.get_all("Provides-Extra")) == {"dev", "flash", "liger", "onnx", "ray", "search"}
    wanted = {line.replace(" ", "") for line in entries("requirements")}
    assert {line for line in data.get_all("Requires-Dist") if "extra" not in line} == wanted
    assert (
        "anchor = anchor_embedding.cli.main:main" in wheel.read(f"{info}/entry_points.txt").decode()
    )
    assert data.get_payload().strip() == (ROOT / "README.md").read_text("utf-8").strip()


def test_source_distribution_has_no_tests_without_their_notebooks(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT / "tests", source / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in [*BUILD_FILES, *package_files()]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    code = "import setuptools.build_meta as build; build.build_sdist('..')"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*BUILD_FILES, *package_files()} <= names
    assert not [name for name in names if name.startswith("tests")]


# ---- workflows


def workflows():
    folder = ROOT / ".github" / "workflows"
    return {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in folder.glob("*.yml")}


def test_workflows_pin_what_they_run_and_ask_for_no_more_than_they_need():
    jobs = {
        (name, key): job for name, flow in workflows().items() for key, job in flow["jobs"].items()
    }
    for job in jobs.values():
        for step in job["steps"]:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step.get("uses", "a/b@" + "0" * 40)), step
            if "actions/checkout@" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False
    assert all(flow["permissions"] == {"contents": "read"} for flow in workflows().values())
    assert [key for key, job in jobs.items() if "permissions" in job] == [("pages", "deploy")]


def test_both_ends_of_the_supported_pythons_are_checked_and_slow_tests_run_every_night():
    flows = workflows()
    assert flows["check"]["jobs"]["check"]["strategy"]["matrix"]["python"] == ["3.11", "3.13"]
    assert flows["nightly"]["jobs"]["slow"]["steps"][-1]["run"] == "bash .ci/run --run-slow"


# ---- imports


def seconds(code):
    def once():
        start = time.perf_counter()
        python(code)
        return time.perf_counter() - start

    return min(once() for _ in range(3))


def test_import_is_fast_and_light():
    """`import anchor_embedding` takes well under a second and loads none of the large libraries."""
    extra = seconds("import anchor_embedding") - seconds("pass")
    assert extra < 0.5, f"import anchor_embedding takes {extra:.2f} s longer than python itself"
    code = (
        "import anchor_embedding, json, sys; print(json.dumps(sorted(m.split('.')[0] for m in "
        "sys.modules)))"
    )
    assert set(json.loads(python(code))) & {*HEAVY, *NOT_NEEDED} == set()


# importing these modules raises ModuleNotFoundError
BLOCK = "import sys; sys.modules.update(dict.fromkeys(sys.argv[1:])); "
IMPORT_ALL = """
import importlib, pkgutil, anchor_embedding
for module in pkgutil.walk_packages(anchor_embedding.__path__, "anchor_embedding."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        print(module.name)
"""


@pytest.mark.thorough
def test_every_module_imports_without_what_it_may_not_need():
    """nbdev, fastcore and execnb are for development only; mteb, datasets and sentence-transformers
    load when they are used.
    """
    files = [path.relative_to(ROOT).with_suffix("").parts for path in PACKAGE.rglob("*.py")]
    modules = {".".join(parts).removesuffix(".__init__") for parts in files} - {"anchor_embedding"}
    imported = set(python(BLOCK + IMPORT_ALL, *NOT_NEEDED).split())
    assert imported == {name for name in modules if not name.endswith("__main__")}


LIGHT = [
    "common.errors",
    "model.text",
    "data.examples",
    "train.recipe",
    "evaluate.retrieval",
    "cli.main",
]


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_neither_torch_nor_transformers(module):
    python(BLOCK + f"import anchor_embedding.{module}", *HEAVY[:2])


def test_shell_scripts_are_clean(tmp_path):
    """The scripts of the project and those that pages show, such as the one for Slurm."""
    scripts = [ROOT / ".ci" / "run", ROOT / ".ci" / "prepare"]
    for path in find_notebooks(ROOT / "nbs"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            blocks = re.findall(r"^```sh\n(#!.*?)^```", "".join(cell["source"]), re.DOTALL | re.M)
            for block in blocks:
                scripts.append(tmp_path / f"{path.stem}-{len(scripts)}")
                scripts[-1].write_text(block)
    assert any("#SBATCH" in script.read_text() for script in scripts)
    command = [Path(sys.executable).with_name("shellcheck"), *scripts]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- what is written twice


def test_readme_and_sidebar_follow_the_notebooks():
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "generate.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    listed = re.findall(
        r"^ +- ([\w/]+\.ipynb)$", (ROOT / "_quarto.yml").read_text("utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(
        str(path.relative_to(ROOT / "nbs")) for path in find_notebooks(ROOT / "nbs")
    )
    assert os.path.samefile(ROOT / "nbs" / "_quarto.yml", ROOT / "_quarto.yml")


def test_results_name_no_folder_of_a_machine():
    """Committed result files say what ran, not where it was on a user's disk."""
    files = sorted([*(ROOT / "nbs" / "results").glob("*.json"), *(ROOT / "tests").glob("*.json")])
    found = [
        f"{f.name}: {m[0]}"
        for f in files
        for m in re.finditer(
            r"(?<![\w.])/(?:root|home|tmp|work|Users|mnt)/[^\"]*", f.read_text("utf-8")
        )
    ]
    assert {f.name for f in files} >= {"quickstart.json", "mutations.json"} and found == []
