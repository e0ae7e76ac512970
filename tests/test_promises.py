"""What public functions say of unusual input: columns of a table, masks, iterators, numbers that
are none.
"""

import json
import re

import numpy as np
import pandas as pd
import pytest

from anchor_embedding.common.errors import InputError
from anchor_embedding.common.tiny import tiny_model, tiny_tokenizer
from anchor_embedding.data.batches import BatchPlan, Instructions
from anchor_embedding.data.examples import Example
from anchor_embedding.data.store import open_examples
from anchor_embedding.embed.batch_encoder import BatchEncoder
from anchor_embedding.embed.corpus import Corpus, CorpusSettings, encode_corpus
from anchor_embedding.embed.embedder import Embedder, default_instructions
from anchor_embedding.embed.index import Index, build_index
from anchor_embedding.embed.reading import generate, reading_report, reconstruction_losses
from anchor_embedding.evaluate.anchors import effective_rank
from anchor_embedding.evaluate.retrieval import (
    HeldoutRetrieval,
    pessimistic_ranks,
    query_ndcg,
    top_hits,
)
from anchor_embedding.evaluate.scores import scores_table, table_markdown
from anchor_embedding.evaluate.significance import compare_runs
from anchor_embedding.model.decoder import CausalDecoder
from anchor_embedding.model.soft_tokens import SoftTokens
from anchor_embedding.model.text import TextTokenizer
from anchor_embedding.objectives.objective import MeanLengths, find_objective, objective_names
from anchor_embedding.train.plan import plan


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = TextTokenizer(tiny_tokenizer("qwen2"), "plain", 48)
    Embedder(CausalDecoder(tiny_model("qwen2")), tokenizer).save_pretrained(folder)
    return folder


def test_columns_of_a_table_are_read_by_place():
    frame = pd.DataFrame(
        {
            "query": [f"question {i}" for i in range(40)],
            "document": [f"text {i}" for i in range(40)],
            "package": [f"package {i // 4}" for i in range(40)],
        }
    ).sample(frac=1, random_state=0)[5:]
    columns = [frame[name] for name in ("query", "document", "package")]
    of_table = HeldoutRetrieval(*columns)
    of_lists = HeldoutRetrieval(*(list(column) for column in columns))
    assert of_table.clusters == of_lists.clusters == list(frame["package"])
    assert of_table.queries == of_lists.queries


def test_a_mask_is_no_row_number(tmp_path):
    rows = [{"query": f"question {i}", "positive": f"text {i}"} for i in range(6)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = open_examples(tmp_path / "pairs.jsonl")
    mask = np.arange(6) % 2 == 1
    for wrong in (mask, [1.7, 2.2], mask.tolist()):
        with pytest.raises(InputError, match=r"rows are whole numbers, .* np\.flatnonzero"):
            store.take(wrong)
    assert [pair.query for pair in store.take(np.flatnonzero(mask))] == [
        "question 1",
        "question 3",
        "question 5",
    ]
    assert store.take(iter([2]))[0].query == "question 2" and store.take([]) == []


def test_two_models_of_one_name_both_are_in_the_table():
    scores = [
        {"model": "model", "tasks": {"STS17": {"type": "STS", "main_score": score}}, "errors": {}}
        for score in (0.5, 0.75)
    ]
    table = scores_table(scores)
    assert table.loc["STS17", ["model", "model (2)"]].tolist() == [0.5, 0.75]
    assert "| 1 | 0.5000 |" in table_markdown(pd.DataFrame({"score": [0.5]}, index=[1]))


def test_the_losses_of_a_report_are_those_of_its_settings(saved):
    embedder = Embedder.from_pretrained(saved, dtype="float32")
    pairs = [Example(f"question {i} of the sea", f"text {i} of ships", (), "a") for i in range(4)]
    settings = {"samples": 1, "max_new_tokens": 2, "decode_opening": "none"}
    report = reading_report(
        {"a": saved}, pairs, 1, load={"dtype": "float32"}, say=lambda line: None, **settings
    )
    expected = reconstruction_losses(embedder, pairs, decode_opening="none")
    assert report["models"]["a"]["losses"] == pytest.approx(expected)
    assert expected["q2d"] != pytest.approx(reconstruction_losses(embedder, pairs)["q2d"])


def test_ranks_refuse_what_would_look_good():
    scores = np.array([[0.1, 0.5, 0.3]])
    broken = np.array([[np.nan, 0.5, 0.3]])
    with pytest.raises(InputError, match="query 0: a score is not a number"):
        pessimistic_ranks(broken, [0])
    with pytest.raises(InputError, match="ignored columns must be in 0 … 2"):
        pessimistic_ranks(scores, [2], ignored=[[-1]])
    with pytest.raises(InputError, match="k = 0"):
        query_ndcg([1], k=0)
    assert pessimistic_ranks(scores, [0], ignored=[[1]]) == [2]


def test_lists_are_columns_too(saved):
    encoder = BatchEncoder(saved, dtype="float32")
    batch = {"text": ["short", "longer text"], "negatives": [["a"], ["b", "c"]], "id": [7, "x"]}
    rows = encoder(batch)
    assert [*rows["negatives"]] == [["a"], ["b", "c"]] and [*rows["id"]] == [7, "x"]
    assert rows["text"].dtype == object and rows["vector"].shape[0] == 2
    assert [*encoder({"text": ["a", "b"], "n": [1, 2]})["n"]] == [1, 2]


def test_the_ids_of_a_corpus_are_a_column(saved, tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"id": "x", "text": "a"}\n{"id": "y", "text": "b"}\n')
    embedder = Embedder.from_pretrained(saved, dtype="float32")
    encode_corpus(embedder, tmp_path / "texts.jsonl", tmp_path / "out", CorpusSettings())
    assert [values for _, values in Corpus(tmp_path / "out").column("id")] == [["x", "y"]]
    with pytest.raises(InputError, match="rank = 2 of world = 2"):
        encode_corpus(embedder, tmp_path / "texts.jsonl", tmp_path / "more", rank=2, world=2)


def test_an_iterator_says_what_its_list_says():
    record = {"symmetric": ["a"], "table": {"a": ["Retrieve duplicates"]}, "name": "own"}
    of_list = default_instructions(record, ["a"])
    assert default_instructions(record, iter(["a"])) == of_list


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"temperature": 0}, "`soft_tokens.temperature` = 0: must be above 0"),
        ({"temperature": -1}, "`soft_tokens.temperature` = -1: must be above 0"),
        ({"temperature": float("nan")}, "`soft_tokens.temperature` = nan: must be finite"),
        ({"steps": "3"}, "`soft_tokens.steps` = '3': must be a whole number"),
        ({"steps": 0}, "`soft_tokens.steps` = 0: must be at least 1"),
        ({"kind": "pauses"}, "`soft_tokens.kind` = 'pauses': must be one of mixture, pause"),
        ({"vocabulary": -1}, "`soft_tokens.vocabulary` = -1: must be at least 0"),
    ],
)
def test_impossible_soft_tokens_are_refused(wrong, words):
    with pytest.raises(InputError, match=f"^{re.escape(words)}$"):
        SoftTokens(**wrong)


def test_one_run_is_checked_like_several():
    a, b = np.ones((1, 9)), np.zeros((1, 9))
    with pytest.raises(InputError, match="alternative = 'two_sided'"):
        compare_runs(a, b, alternative="two_sided")
    with pytest.raises(InputError, match="1 clusters are given for 9 queries"):
        compare_runs(a, b, ["x"])


def test_rows_of_a_dataset_may_be_lists():
    rows = {"a": [0, 1, 4, 5], "b": [2, 3]}
    of_arrays = BatchPlan({name: np.array(places) for name, places in rows.items()}, 2)
    of_lists = BatchPlan(rows, 2)
    steps = range(of_arrays.steps_per_pass)
    assert [of_lists.step(k) for k in steps] == [of_arrays.step(k) for k in steps]
    assert of_lists.batches == {"a": 2, "b": 1}
    with pytest.raises(InputError, match="sampling of 'a' = -1"):
        BatchPlan(rows, 2, sampling={"a": -1})


def test_wrong_numbers_are_named(saved):
    with pytest.raises(InputError, match="one number for each of the same queries"):
        compare_runs([[0.1, 0.2], [0.1]], [[0.1, 0.2], [0.1, 0.2]])
    for shares in (1, [-1]):
        with pytest.raises(InputError, match="negatives = "):
            plan("baseline", mean_lengths={"negatives": shares})
    vectors = np.random.default_rng(0).normal(size=(4, 3))
    vectors[2, 1] = np.nan
    with pytest.raises(InputError, match="vector 2 holds numbers that are not finite"):
        effective_rank(vectors)
    with pytest.raises(InputError, match="batch_size must be at least 1, not 0"):
        decoder = Embedder.from_pretrained(saved, dtype="float32").decoder
        generate(decoder, decoder.causal_lm.get_input_embeddings().weight[:2], 1, batch_size=0)
    with pytest.raises(InputError, match="have a `table` and `symmetric`"):
        Instructions.from_record({})


def test_an_index_of_vectors_without_direction(saved, tmp_path):
    pytest.importorskip("lancedb")
    (tmp_path / "texts.txt").write_text("".join(f"text {i}\n" for i in range(30)))
    embedder = Embedder.from_pretrained(saved, dtype="float32")
    encode_corpus(embedder, tmp_path / "texts.txt", tmp_path / "out", CorpusSettings())
    corpus = Corpus(tmp_path / "out")
    build_index(corpus, progress=False)
    questions = np.stack([np.zeros(corpus.dimension), np.ones(corpus.dimension)])
    none, some = Index(corpus).nearest(questions, 3)
    assert none == [] and len(some) == 3


def test_scores_of_any_type_have_the_same_order():
    scores = [0, 5, 3]
    for dtype in ("uint8", "int64", "float32"):
        assert top_hits(np.array(scores, dtype=dtype)).tolist() == [1, 2, 0]


@pytest.mark.parametrize("name", objective_names())
def test_the_plan_counts_for_the_budget_what_a_run_counts(name):
    objective = find_objective(name)()
    for negatives in (0, 1):
        taken = min(negatives, getattr(objective, "hard_negatives", 0))
        bodies = {"query_body": 10, "document_body": 30, "opening": 2}
        lengths = MeanLengths(query=16, document=40, negatives=taken, **bodies)
        documents = [40] * (1 + taken)
        assert objective.pair_tokens(lengths).budgeted == objective.row_tokens(16, *documents)
