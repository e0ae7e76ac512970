"""A training on a CPU gives memory back before the machine runs out of it."""

from types import SimpleNamespace
from unittest import mock

import psutil
import pytest

from anchor_embedding.common.tiny import tiny_model, tiny_tokenizer
from anchor_embedding.data.examples import Example
from anchor_embedding.model.loading import memory_is_low
from anchor_embedding.train import loop
from anchor_embedding.train.recipe import Recipe
from anchor_embedding.train.stage import train


def memory(available):
    """What the system says of a machine of 8 GB."""
    return mock.patch.object(
        psutil, "virtual_memory", return_value=SimpleNamespace(available=available, total=8e9)
    )


@pytest.mark.parametrize(("available", "low"), [(0, True), (1.3e9, True), (1.4e9, False)])
def test_a_sixth_of_the_memory_is_little(available, low):
    with memory(available):
        assert memory_is_low() is low


@pytest.mark.parametrize(("available", "returned"), [(1e9, 12), (4e9, 1)])
def test_freed_memory_is_returned_after_every_step_while_there_is_little(
    tmp_path, available, returned
):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    tiny_tokenizer("smollm2").save_pretrained(tmp_path / "base")
    pairs = [Example(f"query {n}", f"document {n}", (), "set") for n in range(4)]
    recipe = Recipe(
        name="run",
        objective="contrastive",
        base=str(tmp_path / "base"),
        data="-",
        steps=12,
        warmup_steps=1,
        batch_size=4,
        learning_rate=1e-3,
        dtype="float32",
        tuning="full",
    )
    with memory(available), mock.patch.object(loop, "return_freed_memory") as given_back:
        train(recipe, tmp_path / "run", pairs, progress=False, say=lambda text: None)
    assert given_back.call_count == returned
