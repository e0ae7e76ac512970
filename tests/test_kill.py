"""Runs that are killed at any moment resume to the same bits; runs that must end say so in one line
and keep what was good.
"""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from anchor_embedding.common.files import write_text
from anchor_embedding.common.provenance import device_name, source_commit
from anchor_embedding.common.tiny import PROSE
from anchor_embedding.train.recipe import Recipe

WORDS = PROSE.split()
STEPS = 8
SHARED = {
    "steps": STEPS,
    "batch_size": 8,
    "warmup_steps": 2,
    "max_length": 40,
    "dtype": "float32",
    "checkpoint_every": 2,
    "keep_checkpoints": 2,
}
STAGES = {
    "reconstruction": {"objective": "reconstruction", "learning_rate": 3e-3},
    "contrastive": {"objective": "contrastive", "learning_rate": 1e-2, "token_budget": 100},
}
TUNING = {
    "full": {},
    "lora": {"tuning": "lora", "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.5},
}
# the optimizer is called once per step, whatever else training does
AT_STEP = """
import itertools, os, torch
real, count = torch.optim.AdamW.step, itertools.count(1)

def step(self, *arguments, **settings):
    done = real(self, *arguments, **settings)
    if next(count) == {step}:
        {code}
    return done

torch.optim.AdamW.step = step
"""


@pytest.fixture(scope="module")
def driver():
    """A process that has imported everything; called with a task, it returns exit code and seconds."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(Path(__file__).with_name("kill_driver.py"))]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )

    def call(task):
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield call
    process.stdin.close()
    process.wait(timeout=120)


@dataclass
class Run:
    """A recipe, its data and its folder; calling it runs `anchor train --resume`."""

    driver: object
    home: Path
    name: str = "run"

    @property
    def folder(self):
        return self.home / self.name

    @property
    def log(self):
        return (self.home / "log").read_text()

    def __call__(self, **task):
        """The exit code of one start."""
        arguments = ["train", str(self.home / "recipe.toml"), "--out", str(self.folder), "--resume"]
        done = self.driver(
            {
                "arguments": arguments,
                "folder": str(self.folder),
                "log": str(self.home / "log"),
                **task,
            }
        )
        self.seconds = done["seconds"]
        return done["code"]

    def message(self):
        """The one line printed by a run that was ended on purpose."""
        assert "Traceback" not in self.log, self.log
        (line,) = [line for line in self.log.splitlines() if line.startswith("anchor: ")]
        return line

    def checkpoints(self):
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*"))

    def rows(self):
        return [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]

    def hidden(self):
        return sorted(path.name for path in self.folder.rglob(".*"))


@pytest.fixture(scope="module")
def counts():
    """Kills by test and by kind, each followed by a resumption to the same bits. They are written
    to the file that `KILLS_FILE` names: the committed `kills.json` came from
    `KILLS_FILE=tests/kills.json pytest -n0 tests/test_kill.py --run-slow -k killed`.
    """
    kept = {}
    yield kept
    if path := os.environ.get("KILLS_FILE"):
        about = {"commit": source_commit(), "torch": torch.__version__}
        about |= {"device": device_name(torch.device("cpu")), "date": time.strftime("%Y-%m-%d")}
        total = sum(sum(kinds.values()) for kinds in kept.values())
        record = {"kills": total, "about": about, "tests": kept}
        write_text(path, json.dumps(record, indent=1) + "\n")


@pytest.fixture
def prepare(tmp_path, base, driver):
    """A run that has not begun, and an undisturbed one, `whole`."""

    def make(stage, tuning="full", **settings):
        pairs = [
            {"query": " ".join(WORDS[i : i + 5]), "positive": " ".join(WORDS[i + 5 : i + 17])}
            for i in range(0, 80, 2)
        ]
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        settings = SHARED | STAGES[stage] | TUNING[tuning] | settings
        Recipe(name="run", base=str(base), data=str(tmp_path / "pairs.jsonl"), **settings).save(
            tmp_path / "recipe.toml"
        )
        whole = Run(driver, tmp_path, "whole")
        assert whole() == 0, whole.log
        whole.operations = int((tmp_path / "log.count").read_text())
        return Run(driver, tmp_path), whole

    return make


def check_same(run, whole):
    """The same files, bitwise equal weights, every step once with the same figures, and no files
    left over.
    """
    weights, expected = (
        load_file(each.folder / "final" / "model.safetensors") for each in (run, whole)
    )
    assert weights.keys() == expected.keys()
    assert [name for name in expected if not weights[name].equal(expected[name])] == []
    rows, wanted = (
        [{k: v for k, v in row.items() if k != "seconds"} for row in each.rows()]
        for each in (run, whole)
    )
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)) and rows == wanted
    files, wanted = (
        sorted(str(path.relative_to(each.folder)) for path in each.folder.rglob("*"))
        for each in (run, whole)
    )
    assert files == wanted and run.hidden() == []


# ---- kill -9


def ways_to_die(seed, whole):
    """Endless kinds of kills: after a random time, at a random file operation, in the middle of
    writing a checkpoint's file.
    """
    chance = random.Random(seed)
    largest = max(path.stat().st_size for path in whole.folder.glob("step-*/*.safetensors"))
    for kind in itertools.cycle(("time", "operation", "write")):
        yield (
            kind,
            {
                "time": {"delay": chance.uniform(0.02, whole.seconds)},
                "operation": {"action": "kill", "count": chance.randint(1, whole.operations)},
                "write": {
                    "action": "write",
                    "only": "step-",
                    "count": chance.randint(1, 12),
                    "bytes": chance.randint(1, largest),
                },
            }[kind],
        )


def kill_often(run, whole, kills, seed):
    """Starts a run until this many starts have been killed, then lets it end. Returns how often it
    was killed in each way.
    """
    killed = Counter()
    for kind, task in ways_to_die(seed, whole):
        code = run(**task)
        assert code in (0, -signal.SIGKILL, -signal.SIGXFSZ), run.log
        if code == 0:
            check_same(run, whole)
            shutil.rmtree(run.folder)  # it reached its end, so start from the beginning
        else:
            killed[kind] += 1
        if killed.total() == kills:
            break
    assert run() == 0, run.log
    check_same(run, whole)
    return killed


@pytest.mark.parametrize(
    ("stage", "tuning"),
    [("reconstruction", "full"), pytest.param("contrastive", "lora", marks=pytest.mark.thorough)],
)
def test_killed_runs_go_on_to_the_same_bits(prepare, stage, tuning):
    kill_often(*prepare(stage, tuning), kills=5, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "tuning"), list(itertools.product(STAGES, TUNING)))
def test_killed_often(prepare, counts, stage, tuning):
    killed = kill_often(*prepare(stage, tuning), kills=9, seed=2)
    counts[f"{stage}, {tuning}: at random"] = dict(killed)
    assert all(killed[kind] for kind in ("time", "operation", "write"))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "tuning"), [("reconstruction", "full"), ("contrastive", "lora")])
def test_killed_at_every_file_operation(prepare, counts, stage, tuning):
    run, whole = prepare(stage, tuning)
    for count in range(1, whole.operations + 1):
        assert run(action="kill", count=count) == -signal.SIGKILL
        assert run() == 0, run.log
        check_same(run, whole)
        shutil.rmtree(run.folder)
    counts[f"{stage}, {tuning}: at every file operation"] = {"operation": whole.operations}


@pytest.mark.slow
def test_killed_while_the_result_is_replaced(prepare, counts):
    """A finished run that is started again writes `final` again."""
    run, whole = prepare("reconstruction")
    assert run() == 0, run.log
    for count in itertools.count(1):
        if run(action="kill", only="final", count=count) == 0:
            break
        assert run() == 0, run.log
        check_same(run, whole)
    assert count > 5
    counts["while the result is replaced"] = {"operation": count - 1}


def test_the_committed_counts():
    kept = json.loads(Path(__file__).with_name("kills.json").read_text())
    assert kept["kills"] == sum(sum(kinds.values()) for kinds in kept["tests"].values()) >= 100


@pytest.mark.parametrize(
    ("stage", "tuning"),
    [("reconstruction", "full"), pytest.param("contrastive", "lora", marks=pytest.mark.thorough)],
)
def test_remains_of_a_killed_save_are_removed(prepare, stage, tuning):
    run, whole = prepare(stage, tuning)
    assert run(action="kill", only=".step-000004", count=3) == -signal.SIGKILL
    assert run.checkpoints() == [2] and any(
        name.startswith(".step-000004.") for name in run.hidden()
    )
    assert run() == 0, run.log
    check_same(run, whole)


# ---- requests to stop


OTHER_SIGNALS = [
    (signal.SIGTERM, "save"),
    (signal.SIGTERM, "step"),
    (signal.SIGINT, "save"),
    (signal.SIGHUP, "step"),
]


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "step"),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in OTHER_SIGNALS),
    ],
)
def test_signals_save_and_end(prepare, number, moment):
    run, whole = prepare("reconstruction" if moment == "save" else "contrastive")
    during_step = {"before": AT_STEP.format(step=3, code=f"os.kill(os.getpid(), {int(number)})")}
    during_save = {"action": int(number), "only": ".step-000004", "count": 2}
    assert run(**(during_step if moment == "step" else during_save)) == 128 + number, run.log
    done = {"step": 3, "save": 4}[moment]
    message = run.message()
    assert (
        number.name in message
        and f"after step {done} of {STEPS}" in message
        and "--resume" in message
    ), message
    assert run.checkpoints()[-1] == done and len(run.rows()) == done
    assert not (run.folder / "final").exists() and run.hidden() == []
    assert run() == 0, run.log
    assert run.rows()[-1] == whole.rows()[-1] | {"seconds": run.rows()[-1]["seconds"]}
    assert all(tensor.equal(load_file(whole.folder / "final" / "model.safetensors")[name])
               for name, tensor in load_file(run.folder / "final" / "model.safetensors").items())  # fmt: skip


@pytest.mark.thorough
def test_stopped_pipeline_goes_on_by_the_same_command(driver, base, tmp_path):
    pairs = [
        {"query": " ".join(WORDS[i : i + 5]), "positive": " ".join(WORDS[i + 5 : i + 17])}
        for i in range(0, 80, 2)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    settings = [
        "batch_size=8",
        "steps=4",
        "warmup_steps=3",
        "max_length=40",
        "dtype=float32",
        "evaluation.every=0",
        "evaluation.pairs=4",
    ]
    arguments = [
        "quickstart",
        "--base",
        str(base),
        "--data",
        str(tmp_path / "pairs.jsonl"),
        "--out",
        str(tmp_path / "run"),
    ]
    arguments += [part for setting in settings for part in ("--set", setting)]
    task = {"arguments": arguments, "folder": str(tmp_path / "run"), "log": str(tmp_path / "log")}
    assert (
        driver({**task, "before": AT_STEP.format(step=2, code="os.kill(os.getpid(), 15)")})["code"]
        == 143
    )
    said = (tmp_path / "log").read_text()
    assert (
        "after step 2 of 4" in said
        and "the same command goes on from there" in said
        and "--resume" not in said
    ), said
    assert driver(task)["code"] == 0 and "resumes from step 2" in (tmp_path / "log").read_text()


@pytest.mark.thorough
def test_second_interrupt_ends_at_once(prepare):
    run, whole = prepare("reconstruction")
    twice = "os.kill(os.getpid(), 2); os.kill(os.getpid(), 2)"
    assert run(before=AT_STEP.format(step=3, code=twice)) == 130, run.log
    assert "interrupted" in run.message() and run.checkpoints() == [2]
    assert run() == 0, run.log
    check_same(run, whole)


# ---- faults


def test_loss_that_is_not_a_number(prepare):
    run, whole = prepare("reconstruction")
    spoil = "self.param_groups[0]['params'][0].data.fill_(float('nan'))"
    assert run(before=AT_STEP.format(step=5, code=spoil)) == 2
    message = run.message()
    assert (
        "is nan at step 6" in message
        and "the last checkpoint is step 4" in message
        and str(run.folder) in message
    )
    assert run.checkpoints() == [2, 4]
    assert run() == 0, run.log
    check_same(run, whole)


def test_data_vanishes(prepare):
    run, whole = prepare("contrastive")
    pairs = run.home / "pairs.jsonl"
    text = pairs.read_text()
    code = run(
        before=AT_STEP.format(step=3, code=f"os.remove({str(pairs)!r}); os.kill(os.getpid(), 15)")
    )
    assert code == 143 and run.checkpoints()[-1] == 3, run.log
    assert run() == 2
    assert str(pairs) in run.message() and run.checkpoints()[-1] == 3
    pairs.write_text(text)
    assert run() == 0, run.log
    assert run.rows()[-1]["loss"] == whole.rows()[-1]["loss"]


@pytest.mark.thorough
def test_data_vanishes_while_training(prepare):
    """The data that were read stay readable, so the run continues to its end."""
    run, whole = prepare("reconstruction")
    assert (
        run(before=AT_STEP.format(step=3, code=f"os.remove({str(run.home / 'pairs.jsonl')!r})"))
        == 0
    ), run.log
    check_same(run, whole)
