"""Trackers get what metrics.jsonl has, including the loss of every dataset; a tracker that is not
installed is refused.
"""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from anchor_embedding.common.errors import InputError
from anchor_embedding.common.tiny import PROSE
from anchor_embedding.data.examples import Example
from anchor_embedding.train import stage as training
from anchor_embedding.train.recipe import Recipe

WORDS = PROSE.split()
PAIRS = [
    Example(
        " ".join(WORDS[i : i + 5]), " ".join(WORDS[i + 5 : i + 17]), (), ("prose", "poetry")[i % 2]
    )
    for i in range(40)
]


def recipe(base, tracker):
    settings = {
        "steps": 6,
        "batch_size": 8,
        "warmup_steps": 2,
        "learning_rate": 1e-3,
        "max_length": 40,
        "dtype": "float32",
    }
    return Recipe(
        name="models/run",
        objective="contrastive",
        base=str(base),
        data="-",
        tracker=tracker,
        **settings,
    )


def test_tensorboard_holds_the_metrics(base, tmp_path):
    training.train(recipe(base, "tensorboard"), tmp_path / "run", PAIRS, progress=False, say=print)
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    # one of the metrics, one of the settings
    files = (tmp_path / "run").rglob("events.out.tfevents.*")
    (found,) = [
        each
        for file in files
        if "loss" in (each := EventAccumulator(str(file)).Reload()).Tags()["scalars"]
    ]
    for key in ("loss", "lr", "grad_norm", "tokens"):
        assert [event.step for event in found.Scalars(key)] == [1, 2, 3, 4, 5, 6]
        assert [event.value for event in found.Scalars(key)] == pytest.approx(
            [row[key] for row in rows], rel=1e-5
        )
    for name in ("prose", "poetry"):
        expected = [row["loss"] for row in rows if row["dataset"] == name]
        assert expected and [
            event.value for event in found.Scalars(f"loss/{name}")
        ] == pytest.approx(expected, rel=1e-5)


def test_missing_tracker_is_named_before_anything_is_loaded(base, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install wandb"):
        training.train(recipe(base, "wandb"), tmp_path / "run", PAIRS, progress=False)
    assert not (tmp_path / "run").exists()
