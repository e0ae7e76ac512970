"""An objective from outside the package: a file of the user's own, named in a recipe, is enough."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib

import pytest

from anchor_embedding.common.errors import InputError
from anchor_embedding.common.tiny import tiny_model, tiny_tokenizer
from anchor_embedding.data.batches import Instructions, tokenize_batch
from anchor_embedding.data.examples import Example
from anchor_embedding.model.decoder import CausalDecoder
from anchor_embedding.model.text import TextTokenizer
from anchor_embedding.objectives.reconstruction import Reconstruction, anchor_gain
from anchor_embedding.train.pipeline import from_toml
from anchor_embedding.train.recipe_files import load_recipe
from anchor_embedding.train.stage import train

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


OTHERS = """
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from anchor_embedding.common.settings import Natural, Positive
from anchor_embedding.model.vocabulary import sums_of
from anchor_embedding.objectives.reconstruction import Reconstruction

settings = dataclass(frozen=True, kw_only=True)


@settings
class Doubled(Reconstruction):
    name: ClassVar[str] = "reconstruction"  # copied with the rest of a class

    def weights(self):
        return {name: 2 * weight for name, weight in super().weights().items()}


@settings
class Seeded(Reconstruction):
    seed: Natural = 7


@settings
class Needs(Reconstruction):
    margin: Positive


@settings
class Layers(Reconstruction):
    shares: tuple[float, ...] = (1.0,)
    table: dict[str, float] | None = None


class Outer:
    @settings
    class Inner(Reconstruction):
        pass


@settings
class Tenfold(Reconstruction):
    def loss_of_targets(self, batch, directions):
        return lambda *states: 10 * sums_of(*states)
"""


@pytest.fixture
def others(tmp_path, monkeypatch):
    """The module `other_objectives`, on the path."""
    (tmp_path / "other_objectives.py").write_text(OTHERS)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("other_objectives")


def of(kind, *overrides):
    return load_recipe("stage1", [f"objective=other_objectives:{kind}", *overrides])


def test_a_class_that_kept_the_name_of_ours_is_itself(others):
    """Changed, written and read, a recipe has the class that it was given."""
    recipe = of("Doubled").replace(steps=500)
    for again in (recipe, from_toml(recipe.to_toml())):
        assert type(again.objective) is others.Doubled
        assert again.objective_name == "other_objectives:Doubled" and again.steps == 500
    assert type(of("Outer.Inner").objective) is others.Outer.Inner


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Seeded", "its setting `seed` has the name of one that every recipe has"),
        ("Needs", "`margin` is missing: objective 'other_objectives:Needs' has no default for it"),
        ("Outer.Gone", "has no objective 'Outer.Gone'"),
    ],
)
def test_a_class_that_no_recipe_can_hold_is_refused(others, kind, message):
    with pytest.raises(InputError, match=re.escape(message)):
        of(kind)


@pytest.mark.parametrize("name", [":Needs", ".other_objectives:Needs"])
def test_a_name_without_a_module_is_refused(name):
    with pytest.raises(InputError, match="must be one of bag_of_tokens"):
        load_recipe("stage1", [f"objective={name}"])


def test_settings_are_read_back(others):
    recipe = of("Layers", "shares=0.1,0.2")
    assert from_toml(recipe.to_toml()).shares == recipe.shares == (0.1, 0.2)
    recipe = recipe.replace(table={"a": 0.5})
    with pytest.raises(InputError, match="cannot be written to a recipe: give text, a number"):
        recipe.to_toml()


def test_the_gain_of_another_loss_is_in_nats(others):
    """It is that of -log p for the same texts, while the loss is ten times as large."""
    tokenizer = TextTokenizer(tiny_tokenizer("smollm2"), max_length=40)
    decoder = CausalDecoder(tiny_model("llama")).eval()
    texts = ["what holds the ship", "where is the anchor", "a dog in the park"]
    pairs = [Example(text, f"it is {text} that is asked") for text in texts]
    batch = tokenize_batch(pairs, tokenizer, Instructions.none())
    plain, ten = (kind().prepared(tokenizer) for kind in (Reconstruction, others.Tenfold))
    assert anchor_gain(ten, decoder, batch) == pytest.approx(anchor_gain(plain, decoder, batch))
    assert ten.loss(decoder, batch)["loss"] == pytest.approx(
        10 * plain.loss(decoder, batch)["loss"]
    )


@pytest.mark.parametrize(
    ("recipe", "pairs", "message"),
    [
        ("quickstart", None, "a Pipeline where a Recipe of one stage is needed"),
        ("stage1", [("a query", "a document")], "the pairs are of the type tuple"),
        ("stage1", "pairs.jsonl", "the pairs are of the type str"),
    ],
)
def test_what_is_no_recipe_and_no_pairs_is_refused(tmp_path, recipe, pairs, message):
    with pytest.raises(InputError, match=message):
        train(load_recipe(recipe), tmp_path / "run", pairs)
    assert not (tmp_path / "run").exists()
