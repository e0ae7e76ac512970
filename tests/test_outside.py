"""An objective from outside the package: a file of the user's own, named in a recipe, is enough."""

import json
import os
import subprocess
import sys
import tomllib

import pytest

from anchor_embedding.train.recipe_files import load_recipe

MODULE = """
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F

from anchor_embedding.objectives.contrastive import VectorLoss
from anchor_embedding.common.settings import NotNegative


@dataclass(frozen=True, kw_only=True)
class Alignment(VectorLoss):
    "Pairs near each other, all texts apart."

    spread: NotNegative = 1.0

    title: ClassVar[str] = "alignment"

    def terms(self, vectors, facts, num_pairs):
        unit = F.normalize(vectors.float(), dim=-1)
        near = (unit[:num_pairs] - unit[num_pairs : 2 * num_pairs]).square().sum(1).mean()
        apart = (unit @ unit.T).exp().mean().log()
        return {"near": near, "apart": apart, "loss": near + self.spread * apart}


nothing = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that contains the module."""
    made = tmp_path_factory.mktemp("outside")
    (made / "own_objectives.py").write_text(MODULE)
    return made


def anchor(folder, *arguments, path=True):
    """The command as a user runs it who has put the folder on PYTHONPATH."""
    environment = os.environ | (
        {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])} if path else {}
    )
    return subprocess.run(
        [sys.executable, "-m", "anchor_embedding", *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )


def settings(base, pairs, *more):
    every = [
        "objective=own_objectives:Alignment",
        f"base={base}",
        f"data={pairs}",
        "instructions=none",
        "max_length=40",
        "dtype=float32",
    ]
    every += [
        "steps=4",
        "warmup_steps=1",
        "batch_size=4",
        "learning_rate=1e-2",
        "hard_negatives=0",
        *more,
    ]
    return [word for item in every for word in ("--set", item)]


@pytest.mark.thorough
def test_trains_plans_and_goes_on(folder, base, pairs):
    done = anchor(
        folder,
        "train",
        "stage2",
        "--out",
        folder / "run",
        *settings(base, pairs, "spread=0.5", "checkpoint_every=2"),
    )
    assert done.returncode == 0, done.stderr
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(
        line["loss"] == pytest.approx(line["near"] + 0.5 * line["apart"], abs=1e-5)
        for line in lines
    )
    assert lines[-1]["loss"] < lines[0]["loss"]
    kept = tomllib.loads((folder / "run" / "recipe.toml").read_text())
    assert (kept["objective"], kept["spread"]) == ("own_objectives:Alignment", 0.5)
    card = json.loads((folder / "run" / "card.json").read_text())
    assert card["competitors"] == "the loss is over the 8 texts of a batch"
    assert card["deviations"] is None  # no paper that it could differ from

    again = anchor(
        folder, "train", folder / "run" / "recipe.toml", "--out", folder / "run", "--resume"
    )
    assert again.returncode == 0, again.stderr
    planned = anchor(folder, "plan", folder / "run" / "recipe.toml")
    assert planned.returncode == 0 and "a pair" in planned.stdout, planned.stderr
    shown = anchor(folder, "recipes", folder / "run" / "recipe.toml")
    assert tomllib.loads(shown.stdout) == kept


@pytest.mark.thorough
def test_two_processes_have_the_gradient_of_one(folder, base, pairs):
    losses = {}
    for processes in (1, 2):
        out = folder / f"run{processes}"
        number = ["--nproc", str(processes)] if processes > 1 else []
        done = anchor(
            folder,
            "train",
            "stage2",
            "--out",
            out,
            *number,
            *settings(base, pairs, "lora_dropout=0"),
        )
        assert done.returncode == 0, done.stderr
        losses[processes] = [
            json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()
        ]
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        pytest.param(
            "own_objectives:Alignment",
            False,
            "there is no module 'own_objectives'; is it installed, or its folder on PYTHONPATH?",
            marks=pytest.mark.thorough,
        ),
        (
            "own_objectives:Alinment",
            True,
            "own_objectives has no objective 'Alinment', a class that inherits from `Objective`",
        ),
        pytest.param(
            "own_objectives:nothing", True, "no objective 'nothing'", marks=pytest.mark.thorough
        ),
        pytest.param(
            "alignment", True, "must be one of bag_of_tokens, ", marks=pytest.mark.thorough
        ),
    ],
)
def test_one_that_is_not_there_is_refused_in_a_line(folder, name, path, message):
    done = anchor(folder, "recipes", "stage2", "--set", f"objective={name}", path=path)
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.thorough
def test_a_run_does_not_go_on_with_other_code(tmp_path, base, pairs):
    """Neither a run that is resumed nor a finished stage of a pipeline; comments do not count."""
    file = tmp_path / "own_objectives.py"
    file.write_text(MODULE)
    (tmp_path / "two.toml").write_text(
        f"""name = "two"
[shared]
base = "{base}"
data = "{pairs}"
instructions = "none"
max_length = 40
dtype = "float32"
steps = 2
warmup_steps = 1
batch_size = 4
learning_rate = 1e-2
hard_negatives = 0
[stages.own]
objective = "own_objectives:Alignment"
[arms]
own = ["own"]
[evaluation]
pairs = 4
every = 2
"""
    )
    run = ["--out", tmp_path / "run"]
    alone = ["train", "stage2", *run, *settings(base, pairs, "checkpoint_every=2")]
    both = ["train", tmp_path / "two.toml", "--out", tmp_path / "out"]
    again = ["train", "--resume", tmp_path / "run"]
    for words in (alone, both):
        done = anchor(tmp_path, *words)
        assert done.returncode == 0, done.stderr
    for name in ("report.json", "report.html"):
        (tmp_path / "out" / name).unlink()
    file.write_text(MODULE.replace("near + self.spread", "near  +  self.spread") + "\n# more\n")
    for words in (again, both):
        done = anchor(tmp_path, *words)
        assert done.returncode == 0, done.stderr
    (tmp_path / "out" / "report.json").unlink()
    file.write_text(MODULE.replace("near + self.spread", "near - self.spread"))
    for words in (again, both):
        done = anchor(tmp_path, *words)
        assert done.returncode == 2 and "its code is not that with which" in done.stderr


def test_its_settings_are_checked(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    outside = ["objective=own_objectives:Alignment"]
    assert load_recipe("stage2", [*outside, "spread=2"]).spread == 2.0
    refused = {
        "spread=-1": "`spread` = -1.0: must be at least 0",
        "spred=1": "did you mean",
        "alpha=0.2": "belongs to objective",
        "temperature=0.1": "belongs to objective",  # InfoNCE's; the loss has no use for it
    }
    for wrong, message in refused.items():
        with pytest.raises(ValueError, match=message):
            load_recipe("stage2", [*outside, wrong])
