"""Fixtures that several tests use."""

import json

import pytest

from anchor_embedding.common.tiny import PROSE, tiny_model, tiny_tokenizer
from anchor_embedding.data.sources import read_examples

WORDS = PROSE.split()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny base model on disk."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer("smollm2").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A file of forty pairs."""
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    rows = [
        {"query": " ".join(WORDS[i : i + 5]), "positive": " ".join(WORDS[i + 5 : i + 17])}
        for i in range(0, 80, 2)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def examples(pairs):
    """The same pairs as examples."""
    return list(read_examples(pairs))
