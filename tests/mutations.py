"""Mutation testing: faults of one line are put into the rooms one at a time, and a test must die of each.

    python tests/mutations.py                   the faults of mutations.toml that have no result yet
    python tests/mutations.py --only packing    those with that word in their room, words or test
    python tests/mutations.py --all --jobs 2    every one anew, two at a time

A result counts until the room, its notebook or the test changes; results are kept in mutations.json as
they come, so that a stopped run goes on. mutmut and cosmic-ray change the module that a test imports;
a notebook runs its own cells in place of its module, so under them no notebook would ever die.
"""

import argparse
import ast
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from notebook_checks import ROOT, joined, split_source

LIST = Path(__file__).with_suffix(".toml")
RESULTS = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Fault:
    "A piece of one line and what is put in its place."

    room: str  # below anchor_embedding, such as "model/packing"
    fault: str  # in words
    before: str  # which the room has once
    after: str
    test: str  # the quickest that must die: a notebook, or tests/test_x.py::name

    @property
    def module(self) -> str:
        return f"anchor_embedding/{self.room}.py"

    @property
    def command(self) -> list[str]:
        "The notebook is executed; a test file runs until its first failure."
        node = f"{self.test}::execute" if self.test.endswith(".ipynb") else self.test
        return [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", node]


def read_faults() -> list[Fault]:
    return [Fault(**entry) for entry in tomllib.loads(LIST.read_text("utf-8"))["fault"]]


# ---- a fault in its places


def changed(fault: Fault, source: str) -> str:
    """The source of a module, or of the cells exported to it, with the fault. Raises `ValueError`
    where it does not apply, is no Python or changes nothing.
    """
    times = source.count(fault.before)
    if times != 1 or "\n" in fault.before + fault.after:
        raise ValueError(f"{fault.room}: {times} times (once is wanted): {fault.before}")
    faulty = source.replace(fault.before, fault.after)
    try:
        same = ast.dump(ast.parse(faulty)) == ast.dump(ast.parse(source))
    except SyntaxError as error:
        raise ValueError(f"{fault.room}: {fault.after}: {error}") from None
    if same:
        raise ValueError(f"{fault.room}: it changes nothing: {fault.after}")
    return faulty


def notebook_of(module: str) -> str:
    "The notebook that a module says it is exported from."
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
        raise ValueError(f"{fault.room}: in {len(cells)} exported cells: {fault.before}")
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


# ---- execution


def git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def finished(process: subprocess.Popen, limit: float) -> bool:
    "Wait for a process that leads a group; one that takes longer is ended with its group."
    for patience, number in ((limit, signal.SIGINT), (15, signal.SIGKILL)):
        try:
            process.wait(patience)
            return number == signal.SIGINT
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, number)
    process.wait()
    return False


def run(fault: Fault, copy: Path, prefix: list[str], limit: float) -> dict:
    "Run the test of a fault in a copy as it is: what failed, None where nothing did, and seconds."
    environment = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*prefix, *fault.command, "--notebook-timeout", str(limit)],
            cwd=copy,
            env=os.environ | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended = finished(process, limit + 60)
        log.seek(0)
        output = log.read()
    if ended and process.returncode not in (0, 1):
        raise RuntimeError(f"{fault.test} did not run:\n{output[-2000:]}")
    failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
    killer = failed[1] if failed else f"{fault.test} (its time limit)"
    why = re.findall(r"^(?:E  +|\w*(?:Error|Exception)\b).*", output, re.MULTILINE)
    return {
        "killed_by": None if ended and process.returncode == 0 else killer,
        "seconds": round(time.monotonic() - began, 1),
        "why": " ".join(why[0].split())[:120] if why else "",
    }


def run_faulty(fault: Fault, copy: Path, prefix: list[str], limit: float) -> dict:
    "Put a fault into a copy, run its test, and take it out."
    before = {name: (copy / name).read_text("utf-8") for name in places(fault, copy)}
    try:
        for name, text in places(fault, copy).items():
            (copy / name).write_text(text, "utf-8")
        return run(fault, copy, prefix, limit)
    finally:
        for name, text in before.items():
            (copy / name).write_text(text, "utf-8")


def copies(folder: Path, number: int) -> queue.Queue:
    "Clones of the checkout's commit, outside the user's tree."
    free = queue.Queue()
    for i in range(number):
        git("clone", "-q", "--shared", str(ROOT), str(folder / str(i)))
        free.put(folder / str(i))
    return free


# ---- results


def read_results() -> dict[str, dict]:
    "What is known: key of a fault → its entry."
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
    "Whether a test died of the fault, and nothing that matters has changed since."
    if entry is None or entry["killed_by"] is None:
        return False
    notebook = notebook_of((ROOT / fault.module).read_text("utf-8"))
    files = [fault.module, notebook, fault.test.partition("::")[0]]
    command = ["git", "-C", str(ROOT), "diff", "--quiet", entry["commit"], "HEAD", "--", *files]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def write_results(faults: list[Fault], found: dict[str, dict], device: str) -> None:
    "All that is known of the faults of the list, in its order."
    keys = [key_of(entry_of(fault)) for fault in faults]
    entries = [found[key] for key in keys if key in found]
    killed = sum(entry["killed_by"] is not None for entry in entries)
    about = {
        "command": "python tests/mutations.py",
        "device": device,
        "faults": len(faults),
        "killed": killed,
    }
    text = json.dumps({"about": about, "faults": entries}, indent=1, ensure_ascii=False)
    RESULTS.write_text(text + "\n", "utf-8")


# ---- the command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="faults with this in their room, words or test")
    parser.add_argument("--all", action="store_true", help="also those that have a result")
    parser.add_argument("--jobs", type=int, default=1, help="tests at the same time")
    parser.add_argument("--limit", type=float, default=200, help="seconds a test may take")
    parser.add_argument("--prefix", default="", help='put before every test, such as "nice -n 5"')
    asked = parser.parse_args()
    faults = read_faults()
    found = read_results()
    wanted = [
        fault
        for fault in faults
        if asked.only in f"{fault.room} {fault.fault} {fault.test}"
        and (asked.all or not counts(found.get(key_of(entry_of(fault))), fault))
    ]
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        lives = Session(asked, faults, found, Path(folder)).work(wanted)
    print(
        f"{len(wanted)} faults, {len(lives)} live",
        *(f"  {fault.fault}" for fault in lives),
        sep="\n",
    )
    return 1 if lives else 0


class Session:
    "One call of the command: copies to work in, and results that are written as they come."

    def __init__(self, asked, faults: list[Fault], found: dict[str, dict], folder: Path):
        import torch

        from anchor_embedding.common.provenance import device_name

        self.prefix = shlex.split(asked.prefix)
        self.limit = asked.limit
        self.jobs = asked.jobs
        self.faults = faults
        self.found = found
        self.free = copies(folder, asked.jobs)
        self.commit = git("rev-parse", "--short=12", "HEAD")
        self.device = device_name(torch.device("cpu"))
        self.lock = threading.Lock()

    def borrowed(self, function, fault: Fault) -> dict:
        "A function of a fault, in a copy that nobody uses meanwhile."
        copy = self.free.get()
        try:
            return function(fault, copy, self.prefix, self.limit)
        finally:
            self.free.put(copy)

    def passes(self, fault: Fault) -> None:
        "Raise `RuntimeError` where a test fails without any fault."
        plain = self.borrowed(run, fault)
        if plain["killed_by"]:
            raise RuntimeError(f"{fault.test} fails without a fault: {plain['why']}")

    def judge(self, fault: Fault) -> bool:
        "Try one fault; whether it lives."
        outcome = self.borrowed(run_faulty, fault)
        entry = entry_of(fault) | outcome
        entry |= {"commit": self.commit, "date": time.strftime("%Y-%m-%d")}
        with self.lock:
            self.found[key_of(entry)] = entry
            write_results(self.faults, self.found, self.device)
        verdict = "LIVES" if entry["killed_by"] is None else "died"
        print(f"{verdict} {entry['seconds']:5.1f} s  {fault.room}: {fault.fault}  [{entry['why']}]")
        sys.stdout.flush()
        return entry["killed_by"] is None

    def work(self, wanted: list[Fault]) -> list[Fault]:
        "Every test without a fault, then every fault; those that live."
        each = {fault.test: fault for fault in wanted}
        with ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(self.passes, each.values()))
            verdicts = list(pool.map(self.judge, wanted))
        write_results(self.faults, self.found, self.device)
        return [fault for fault, lives in zip(wanted, verdicts, strict=True) if lives]


if __name__ == "__main__":
    sys.exit(main())
