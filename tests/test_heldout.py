"""No text that a run is judged by is trained on: looked at in what `train` is given and what is encoded, whatever the data."""

import json
from functools import partial
from unittest import mock

import pytest

from anchor_embedding import pipeline
from anchor_embedding.docstrings import docstring_pairs
from anchor_embedding.embedder import Embedder
from anchor_embedding.recipe import load_recipe
from anchor_embedding.testing import PROSE
from anchor_embedding.tournament import tournament

WORDS = PROSE.split()


def words(start, number):
    return " ".join(WORDS[(start + i) % len(WORDS)] for i in range(number))


def write_pairs(path):
    """Forty pairs that share their texts: one positive for two queries, in another case or with other spaces, a positive that is
    a query elsewhere, and positives of others as negatives."""
    documents = [f"{words(3 * i, 9)} {i}" for i in range(30)]
    rows = [
        {"query": f"{words(5 * i, 4)}?", "positive": text, "negatives": [documents[i - 1], documents[i - 2].upper()]}
        for i, text in enumerate(documents)
    ]
    rows += [{"query": f"again {words(7 * i, 3)}", "positive": f"  {documents[i].title()}", "negatives": [documents[i + 9]]} for i in range(5)]
    rows += [{"query": documents[i].replace(" ", "  "), "positive": f"an answer to {i}", "negatives": []} for i in range(5, 10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(way, data, base, out):
    """A pipeline or a tournament on pairs of this source."""
    settings = [f"base={base}", f"data={data}", "batch_size=8", "max_length=24", "dtype=float32"]
    quiet = {"progress": False, "say": lambda text: None}
    if way == "pipeline":
        more = ["steps=2", "evaluation.pairs=15", "evaluation.every=2"]
        pipeline.run_pipeline(load_recipe("quickstart", [*settings, *more]), out, **quiet)
    else:
        tournament(["baseline"], out, amount=2, every=1, overrides=settings, heldout=15, **quiet)


@pytest.fixture
def seen():
    """The pairs that were trained on, and the texts that were encoded, which is done only to judge."""
    given, judged, train, encode = [], set(), pipeline.train, Embedder.encode

    def watched_train(recipe, out, examples, *arguments, **settings):
        given.extend(examples)
        return train(recipe, out, examples, *arguments, **settings)

    def watched_encode(embedder, texts, *arguments, **settings):
        judged.update([texts] if isinstance(texts, str) else texts)
        return encode(embedder, texts, *arguments, **settings)

    few = partial(docstring_pairs, packages=["joblib", "peft"])
    with (
        mock.patch.object(pipeline, "train", watched_train),
        mock.patch.object(Embedder, "encode", watched_encode),
        mock.patch.object(pipeline, "docstring_pairs", few),
    ):
        yield given, judged


def alike(texts):
    return {" ".join(text.casefold().split()) for text in texts}


@pytest.mark.parametrize("way", ["pipeline", "tournament"])
@pytest.mark.parametrize("data", ["docstrings", "pairs"])
def test_no_judged_text_is_trained_on(seen, base, tmp_path, way, data):
    if data == "pairs":
        write_pairs(tmp_path / "pairs.jsonl")
    run(way, tmp_path / "pairs.jsonl" if data == "pairs" else data, base, tmp_path / "out")
    given, judged = seen[0], alike(seen[1])
    assert len(judged) >= 25 and len(given) >= 8, "both must have been seen"
    for side in (lambda pair: [pair.query], lambda pair: [pair.positive], lambda pair: pair.negatives):
        assert not judged & alike(text for pair in given for text in side(pair))
