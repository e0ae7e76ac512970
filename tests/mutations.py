"""Mutation testing: inserts one-line faults into the rooms, one at a time; each must make a test fail.

    python tests/mutations.py                   the faults of mutations.toml that have no result yet
    python tests/mutations.py --only packing    those with that word in their room, description or test
    python tests/mutations.py --all --jobs 2    all faults again, two at a time

A result is valid until the room, its notebook or the test changes. Results are stored in mutations.json as
they come, so that a stopped run can continue. mutmut and cosmic-ray change the module that a test imports;
a notebook runs its own cells instead of its module, so with them no notebook would ever fail.
"""

import argparse
import ast
import fcntl
import json
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from notebook_checks import ROOT, cell_flags, check, joined, set_environment, split_source

LIST = Path(__file__).with_suffix(".toml")
RESULTS = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Fault:
    "A piece of one line and its replacement."

    room: str  # path in anchor_embedding, such as "model/packing"
    fault: str  # a description
    before: str  # code that occurs once in the room
    after: str
    test: str  # the quickest test that must fail: a notebook, or tests/test_x.py::name

    @property
    def module(self) -> str:
        return f"anchor_embedding/{self.room}.py"


def read_faults() -> list[Fault]:
    return [Fault(**entry) for entry in tomllib.loads(LIST.read_text("utf-8"))["fault"]]


# ---- inserting a fault


def changed(fault: Fault, source: str) -> str:
    """The source of a module, or of the cells exported to it, with the fault. Raises `ValueError`
    if the fault does not apply, is not valid Python or changes nothing.
    """
    times = source.count(fault.before)
    if times != 1 or "\n" in fault.before + fault.after:
        raise ValueError(f"{fault.room}: found {times} times instead of once: {fault.before}")
    faulty = source.replace(fault.before, fault.after)
    try:
        same = ast.dump(ast.parse(faulty)) == ast.dump(ast.parse(source))
    except SyntaxError as error:
        raise ValueError(f"{fault.room}: {fault.after}: {error}") from None
    if same:
        raise ValueError(f"{fault.room}: the fault changes nothing: {fault.after}")
    return faulty


def notebook_of(module: str) -> str:
    "The notebook from which a module says that it is exported."
    return re.search(r"File to edit: (?:\.\./)+(nbs/.*\.ipynb)", module)[1]


def changed_notebook(fault: Fault, text: str) -> str:
    "A notebook with the fault in an exported cell."
    document = json.loads(text)
    cells = [
        cell
        for cell in document["cells"]
        if cell["cell_type"] == "code"
        and {"export", "exports", "exporti"} & split_source(cell)[0]
        and fault.before in joined(cell["source"])
    ]
    if len(cells) != 1:
        raise ValueError(
            f"{fault.room}: found in {len(cells)} exported cells instead of one: {fault.before}"
        )
    cells[0]["source"] = changed(fault, joined(cells[0]["source"]))
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def places(fault: Fault, root: Path = ROOT) -> dict[str, str]:
    "File → its text with the fault: the module and its notebook. Raises `ValueError`."
    module = (root / fault.module).read_text("utf-8")
    notebook = notebook_of(module)
    return {
        fault.module: changed(fault, module),
        notebook: changed_notebook(fault, (root / notebook).read_text("utf-8")),
    }


# ---- execution, in processes that have done the slow imports and have a copy each

COPY = Path()  # the copy of this process


def git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def enter(copies) -> None:
    "Makes this process work in a copy of the commit and import from it."
    import torch  # noqa: F401
    import transformers  # noqa: F401

    global COPY
    COPY = copies.get()
    set_environment(COPY.parent / f"scratch-{COPY.name}")
    os.environ |= {"PYTHONPATH": str(COPY), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path[:] = [str(COPY), *(path for path in sys.path if path != str(ROOT))]
    os.chdir(COPY)


def run_notebook(test: str, limit: float) -> tuple[bool, str]:
    "Whether a notebook of the copy passes, and its output."
    found = check(COPY / test, cell_flags(), limit, root=COPY)
    return found.ok, "\n".join([*found.faults, found.log])


def run_pytest(test: str, limit: float) -> tuple[bool, str]:
    "Whether a test file of the copy passes, stopping at its first failure, and its output."
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        child = os.fork()
        if not child:
            become_pytest(test, log)
        deadline = time.monotonic() + limit
        code = None
        while code is None and time.monotonic() < deadline:
            time.sleep(0.1)
            ended, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else None
        if code is None:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        log.seek(0)
        said = log.read()
    if code not in (0, 1, None):
        raise RuntimeError(f"{test} did not run:\n{said[-2000:]}")
    return code == 0, said if code is not None else f"stopped at its time limit of {limit:g} s"


def become_pytest(test: str, log) -> None:
    "Runs in a separate process, the leader of a process group."
    os.setsid()
    for number in (1, 2):
        os.dup2(log.fileno(), number)
    for name in ("notebook_checks", "mutations"):
        sys.modules.pop(name, None)
    sys.path.insert(0, str(COPY / "tests"))
    import pytest

    code = pytest.main(["-x", "-n0", "-q", "--thorough", "-p", "no:cacheprovider", test])
    sys.stdout.flush()
    os._exit(code)


def run(fault: Fault, limit: float) -> dict:
    """Runs the test of a fault in the copy as it is: what failed (None if nothing did), seconds,
    why.
    """
    began = time.monotonic()
    way = run_notebook if fault.test.endswith(".ipynb") else run_pytest
    passed, said = way(fault.test, limit)
    failed = re.search(r"^FAILED (\S+)", said, re.MULTILINE)
    why = re.search(r"^(?:E  +|\w*(?:Error|Exception)\b|stopped at).*", said, re.MULTILINE)
    return {
        "killed_by": None if passed else failed[1] if failed else fault.test,
        "seconds": round(time.monotonic() - began, 1),
        "why": ""
        if passed
        else without_folders(" ".join(why[0].partition(" in /")[0].split()))[:100]
        if why
        else "another output",
    }


def without_folders(text: str) -> str:
    "Paths shortened to their last part, to hide where a machine keeps its files."
    return re.sub(r"(?<![\w.])/(?:[^\s/'\"]+/)+", "", text)


def run_faulty(fault: Fault, limit: float) -> dict:
    "Inserts a fault into the copy, runs its test, and removes the fault."
    faulty = places(fault, COPY)
    before = {name: (COPY / name).read_text("utf-8") for name in faulty}
    try:
        for name, text in faulty.items():
            (COPY / name).write_text(text, "utf-8")
        return run(fault, limit)
    finally:
        for name, text in before.items():
            (COPY / name).write_text(text, "utf-8")


# ---- results


def read_results() -> dict[str, dict]:
    "The results so far: key of a fault → its entry."
    if not RESULTS.exists():
        return {}
    entries = json.loads(RESULTS.read_text("utf-8"))["faults"]
    return {key_of(entry): entry for entry in entries}


def key_of(entry: dict) -> str:
    return json.dumps([entry[name] for name in ("file", "before", "after", "test")])


def entry_of(fault: Fault) -> dict:
    values = asdict(fault)
    return {"file": fault.module} | {key: values[key] for key in values if key != "room"}


def counts(entry: dict | None, fault: Fault) -> bool:
    "Whether a test failed because of the fault, and nothing relevant has changed since."
    if entry is None or entry["killed_by"] is None:
        return False
    notebook = notebook_of((ROOT / fault.module).read_text("utf-8"))
    files = [fault.module, notebook, fault.test.partition("::")[0]]
    command = ["git", "-C", str(ROOT), "diff", "--quiet", entry["commit"], "HEAD", "--", *files]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def keep(faults: list[Fault], entry: dict) -> None:
    "Stores an entry among those of the other faults, in the order of the list."
    with open(LIST) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another call may be working on other faults
        found = read_results() | {key_of(entry): entry}
        keys = [key_of(entry_of(fault)) for fault in faults]
        entries = [found[key] for key in keys if key in found]
        about = {
            "command": "python tests/mutations.py",
            "device": f"cpu {platform.machine()}, 1 thread",
            "faults": len(faults),
            "killed": sum(each["killed_by"] is not None for each in entries),
        }
        text = json.dumps({"about": about, "faults": entries}, indent=1, ensure_ascii=False)
        RESULTS.write_text(text + "\n", "utf-8")


# ---- the command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", default="", help="words in the room, fault or test, such as loop|mining"
    )
    parser.add_argument("--all", action="store_true", help="include faults that have a result")
    parser.add_argument("--jobs", type=int, default=1, help="number of tests at the same time")
    parser.add_argument("--limit", type=float, default=300, help="maximum seconds for a test")
    parser.add_argument(
        "--trust", action="store_true", help="do not run the tests without a fault first"
    )
    args = parser.parse_args()
    faults = read_faults()
    found = read_results()
    wanted = [
        fault
        for fault in faults
        if any(one in f"{fault.room} {fault.fault} {fault.test}" for one in args.only.split("|"))
        and (args.all or not counts(found.get(key_of(entry_of(fault))), fault))
    ]
    with tempfile.TemporaryDirectory(prefix="mutations-", ignore_cleanup_errors=True) as folder:
        lives = work(wanted, faults, Path(folder), args)
    print(f"{len(wanted)} faults, {len(lives)} live", *lives, sep="\n  ")
    return 1 if lives else 0


def workers(folder: Path, number: int) -> ProcessPoolExecutor:
    "Processes that each have a clone of the checkout's commit, outside the user's tree."
    context = multiprocessing.get_context("spawn")
    copies = context.Queue()
    for name in map(str, range(number)):
        git("clone", "-q", "--shared", str(ROOT), str(folder / name))
        copies.put(folder / name)
    return ProcessPoolExecutor(number, context, enter, (copies,))


def work(wanted, faults, folder, args) -> list[str]:
    """Runs every test without a fault, then every fault, and stores results as they come; returns
    the faults that survive.
    """
    commit = git("rev-parse", "--short=12", "HEAD")
    lives = []
    with workers(folder, args.jobs) as pool:
        each = [] if args.trust else [*{fault.test: fault for fault in wanted}.values()]
        for fault, plain in zip(each, pool.map(run, each, [args.limit] * len(each)), strict=True):
            print(f"{plain['seconds']:6.1f} s  {fault.test}", flush=True)
            if plain["killed_by"]:
                raise SystemExit(f"{fault.test} fails without a fault: {plain['why']}")
        outcomes = pool.map(run_faulty, wanted, [args.limit] * len(wanted))
        for fault, outcome in zip(wanted, outcomes, strict=True):
            entry = entry_of(fault) | outcome
            entry |= {"commit": commit, "date": time.strftime("%Y-%m-%d")}
            keep(faults, entry)
            verdict = "LIVES" if entry["killed_by"] is None else "died "
            line = f"{fault.room}: {fault.fault}"
            print(f"{verdict} {entry['seconds']:5.1f} s  {line}  [{entry['why']}]", flush=True)
            lives += [line] if entry["killed_by"] is None else []
    return lives


if __name__ == "__main__":
    sys.exit(main())
