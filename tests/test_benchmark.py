"""Scores are those of mteb: they equal mteb's own run of a sentence-transformers model with the
same vectors.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import time
import warnings
import zlib
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch

from anchor_embedding.common.errors import InputError
from anchor_embedding.common.scores import read_scores
from anchor_embedding.common.tiny import PROSE, tiny_model, tiny_tokenizer
from anchor_embedding.embed.embedder import Embedder
from anchor_embedding.embed.encoders import load_model
from anchor_embedding.embed.export import export_embedder
from anchor_embedding.evaluate import benchmark, candidate, encoder
from anchor_embedding.evaluate.benchmark import evaluate, run_task
from anchor_embedding.evaluate.encoder import MtebEncoder, VectorStore, style_of
from anchor_embedding.evaluate.local_tasks import open_tasks
from anchor_embedding.evaluate.scored import run_label
from anchor_embedding.evaluate.scores import scores_table
from anchor_embedding.evaluate.sweep import TaskEvaluator, sweep
from anchor_embedding.model.decoder import CausalDecoder, probe
from anchor_embedding.model.soft_tokens import SoftTokens
from anchor_embedding.model.text import TextTokenizer
from anchor_embedding.train.runs import read_log

WORDS = sorted(set(PROSE.split()))
REAL = Path(os.environ["ANCHOR_DATA"]) / "eval" if os.environ.get("ANCHOR_DATA") else None
needs_data = pytest.mark.skipif(
    REAL is None or not REAL.is_dir(),
    reason="real tasks: set ANCHOR_DATA to the folder that holds eval/",
)
CHEAP = ("STS17", "AskUbuntuDupPairs", "HotpotQADistractor")


def local_tasks(folder, names=None):
    """All tasks of a folder, or raises the first one's error."""
    tasks = list(open_tasks(names, folder).values())
    for task in tasks:
        if isinstance(task, InputError):
            raise task
    return tasks


def tiny(seed=0, template="plain", max_length=64):
    """A random model of 32 dimensions."""
    decoder = CausalDecoder(tiny_model(seed=seed))
    probe(decoder)
    return Embedder(
        decoder, TextTokenizer(tiny_tokenizer("smollm2"), template, max_length=max_length)
    )


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(folder)
    return folder


# ---- generated tasks of every kind


def sentence(rng, topic, words=9):
    """Words near a position in the vocabulary: sentences of one topic share some."""
    near = rng.integers(0, 12, words // 2) + 12 * topic
    return " ".join(
        WORDS[i % len(WORDS)] for i in [*near, *rng.integers(0, len(WORDS), words - words // 2)]
    )


def write(folder, **tables):
    folder.mkdir(parents=True)
    for stem, rows in tables.items():
        if isinstance(rows, str):
            (folder / f"{stem}.tsv").write_text(rows)
        else:
            (folder / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def retrieval(folder, documents, queries):
    """Retrieval of a given size: the relevant document of a query holds its words."""
    rng = np.random.default_rng(0)
    corpus = [
        {"_id": f"d{i}", "title": f"t{i % 7}", "text": sentence(rng, i % 20, 14)}
        for i in range(documents)
    ]
    asked = []
    qrels = "query-id\tcorpus-id\tscore\n"
    for i in range(queries):
        asked.append(
            {"_id": f"q{i}", "text": " ".join(corpus[i * 7 % documents]["text"].split()[:6])}
        )
        qrels += f"q{i}\td{i * 7 % documents}\t1\nq{i}\td{(i * 7 + 20) % documents}\t1\n"
    write(folder, corpus=corpus, queries=asked, qrels=qrels)


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """One task of each kind, the retrieval task of SciFact's size (5,183 documents, 300 queries)."""
    data = tmp_path_factory.mktemp("tasks")
    rng = np.random.default_rng(1)

    def text(topic):
        return sentence(rng, topic)

    retrieval(data / "retrieval" / "SciFact", 5183, 300)
    pairs = [(text(i % 5), text(i % (2 + i % 4))) for i in range(200)]
    paraphrases = [" ".join([*a.split()[: i % 6], b]) for i, (a, b) in enumerate(pairs)]
    scored = [
        {"sentence1": a, "sentence2": paraphrases[i], "score": i % 6 * 0.9}
        for i, (a, _) in enumerate(pairs)
    ]
    write(data / "sts" / "STSBenchmark", pairs=scored)
    write(
        data / "pairclassification" / "Pairs",
        test=[{"sentence1": a, "sentence2": b, "label": i % 2} for i, (a, b) in enumerate(pairs)],
    )
    rows = [
        {"text": text(i % 4), "label": i % 4, "label_text": f"topic {i % 4}"} for i in range(300)
    ]
    write(data / "classification" / "EmotionClassification", train=rows[:150], test=rows[150:])
    sets = [
        {
            "sentences": [text(i % 6) for i in range(120)],
            "labels": [f"topic {i % 6}" for i in range(120)],
        }
        for _ in range(3)
    ]
    write(data / "clustering" / "TwentyNewsgroupsClustering", test=sets)
    lists = [
        {
            "query": text(i % 5),
            "positive": [text(i % 5)],
            "negative": [text(j) for j in range(5) if j != i % 5],
        }
        for i in range(60)
    ]
    write(
        data / "reranking" / "Lists",
        test=[*lists, {"query": "all are right", "positive": ["a"], "negative": []}],
    )
    return data


# ---- agreement with mteb


class BagOfWords(Embedder):
    """Sums of random word vectors instead of a model's: quick, with scores between perfect and
    chance.
    """

    def __init__(self, model):
        super().__init__(model.decoder, model.tokenizer, model.pooling)
        self.made = {}
        self.table = (
            np.random.default_rng(3).standard_normal((997, model.dimension)).astype(np.float32)
        )

    def encode(self, texts, instruction=None, *args, **options):
        words = [[zlib.crc32(word.encode()) % 997 for word in text.split()] for text in texts]
        vectors = np.array([self.table[row].sum(axis=0) for row in words])
        self.made |= dict(zip(texts, vectors, strict=True))
        return vectors


class Stored(torch.nn.Module):
    """A module of sentence-transformers that looks up vectors computed elsewhere; it fails for
    other texts.
    """

    def __init__(self, made):
        super().__init__()
        self.made = made
        self.anchor = torch.nn.Parameter(torch.zeros(1))

    def preprocess(self, inputs, **_):
        return {"rows": torch.tensor(np.array([self.made[text] for text in inputs]))}

    def forward(self, features, **_):
        return {"sentence_embedding": features["rows"]}

    def get_embedding_dimension(self):
        return len(next(iter(self.made.values())))


def of_mteb(sentence_transformer, task):
    """The main score of mteb's own run, with mteb's own wrapper."""
    import mteb

    logging.getLogger("mteb").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {
            "cache": None,
            "co2_tracker": False,
            "encode_kwargs": {"batch_size": 64, "show_progress_bar": False},
        }
        return (
            mteb.evaluate(sentence_transformer, task, show_progress_bar=False, **options)
            .task_results[0]
            .get_score()
        )


def agrees(model, folder, name):
    """Our entry for a task, and mteb's score of a real SentenceTransformer with the same vectors."""
    from sentence_transformers import SentenceTransformer

    (ours,) = local_tasks(folder, name)
    (theirs,) = local_tasks(folder, name)
    model = BagOfWords(model)
    entry, _ = run_task(MtebEncoder(model, style_of(model, "none")), ours)
    return entry, of_mteb(SentenceTransformer(modules=[Stored(model.made)], device="cpu"), theirs)


KINDS = (
    pytest.param("SciFact", marks=pytest.mark.thorough),
    "STSBenchmark",
    "Pairs",
    "EmotionClassification",
    "TwentyNewsgroupsClustering",
    "Lists",
)


@pytest.mark.parametrize("name", KINDS)
def test_score_equals_mteb_on_the_same_vectors(model, generated, name):
    entry, theirs = agrees(model, generated, name)
    assert entry["main_score"] == pytest.approx(theirs, abs=1e-4)
    assert 0.01 < entry["main_score"] < 0.99  # vectors in another order would give other scores


def as_sentence_transformer(model, folder):
    """The same weights as a sentence-transformers folder, with transformers' own attention and EOS
    added by the tokenizer.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer("smollm2")
    eos = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {eos}", special_tokens=[(eos, tokenizer.eos_token_id)]
    )
    tokenizer.pad_token = tokenizer.pad_token or eos
    tokenizer.chat_template = None  # otherwise it wraps texts in a conversation
    model.decoder.causal_lm.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    words = Transformer(str(folder / "base"), max_seq_length=512)
    SentenceTransformer(modules=[words, Pooling(model.dimension, "lasttoken")], device="cpu").save(
        str(folder / "st")
    )
    return folder / "st"


@pytest.mark.thorough
def test_a_sentence_transformers_folder_scores_the_same(model, generated, tmp_path):
    """Our packed encoding and padded batches, each through its own path into mteb, compared by
    their scores.
    """
    other = as_sentence_transformer(model, tmp_path)
    assert not isinstance(load_model(other), Embedder)
    options = {
        "prompts": "none",
        "dtype": "float32",
        "device": "cpu",
        "say": lambda text: None,
        "progress": False,
    }
    names = ["STSBenchmark", "Lists", "Pairs"]
    ours = evaluate(model, names, tmp_path / "out", generated, **options)
    theirs = evaluate(other, names, tmp_path / "out", generated, **options)
    assert not ours["errors"] and not theirs["errors"]
    for name in names:
        assert ours["tasks"][name]["main_score"] == pytest.approx(
            theirs["tasks"][name]["main_score"], abs=1e-4
        )
    assert (
        theirs["about"]["wording"].startswith("the model's own")
        and not {"prompts", "max_length", "dtype"} & theirs["about"].keys()
    )
    assert ours["about"]["dtype"] == "float32" and list(scores_table([ours, theirs]).columns)[
        1:
    ] == ["model-none", "st"]


def test_an_export_of_unit_vectors_is_scored_by_these(saved, generated, tmp_path, monkeypatch):
    lengths = {True: [], False: []}

    class Recorded(MtebEncoder):
        def encode(self, *inputs, **settings):
            vectors = super().encode(*inputs, **settings)
            lengths[self.normalize].extend(np.linalg.norm(vectors, axis=1))
            return vectors

    monkeypatch.setattr(benchmark, "MtebEncoder", Recorded)
    for normalize in (True, False):
        out = tmp_path / str(normalize)
        export_embedder(saved, out, normalize=normalize, base="owner/a-base", license="mit")
        options = {"dtype": "float32", "device": "cpu", "say": str, "progress": False}
        scores = evaluate(out, "Pairs", tmp_path / "scores", generated, **options)
        assert scores["about"].get("normalize", False) == normalize
    assert np.allclose(lengths[True], 1, atol=1e-5)
    assert len(lengths[False]) == len(lengths[True]) and not np.allclose(lengths[False], 1)


def test_other_models_read_few_texts_at_a_time_on_the_device_that_is_named(
    saved, generated, tmp_path, monkeypatch
):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    words = tiny_tokenizer("smollm2").backend_tokenizer
    static = SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=16)], device="cpu")
    # as a model of the hub, which has no config.json
    snapshot = tmp_path / "hub" / "models--peer--static" / "snapshots" / ("1" * 40)
    static.save(str(snapshot))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    sizes = set()
    encode = SentenceTransformer.encode

    def recorded(self, *texts, batch_size=32, **options):
        sizes.add(batch_size)
        return encode(self, *texts, batch_size=batch_size, **options)

    monkeypatch.setattr(SentenceTransformer, "encode", recorded)
    quiet = {"say": str, "progress": False}
    scores = evaluate("peer/static", "Pairs", tmp_path / "scores", generated, **quiet)
    assert not scores["errors"] and sizes == {32}
    assert scores["about"]["revision"] == "1" * 40
    with pytest.raises(InputError, match="batch_tokens: only for models of this package"):
        evaluate("peer/static", "Pairs", tmp_path, generated, batch_tokens=512, **quiet)
    devices = []

    class Recorded(MtebEncoder):
        def __init__(self, *given, **settings):
            devices.append(settings.get("devices"))
            super().__init__(*given, **settings)

    monkeypatch.setattr(benchmark, "MtebEncoder", Recorded)
    for device in ("cpu", None):
        evaluate(saved, "Pairs", tmp_path / f"on-{device}", generated, device=device, **quiet)
    assert devices == [["cpu"], None]


# ---- stored results and failures


@pytest.fixture
def quick(generated, tmp_path):
    """Arguments of an evaluation on two small tasks."""
    return {
        "tasks": "Lists,Pairs",
        "data_dir": generated,
        "dtype": "float32",
        "progress": False,
        "out": tmp_path / "out",
    }


def test_done_tasks_are_not_run_again(saved, quick, monkeypatch):
    first = evaluate(saved, **quick, say=lambda text: None)
    said = []
    monkeypatch.setattr(
        candidate,
        "load_model",
        lambda *_: pytest.fail("the model was loaded although everything was done"),
    )
    assert evaluate(saved, **quick, say=said.append) == first and not said
    monkeypatch.undo()
    entry = evaluate(saved, **quick | {"tasks": "Pairs,STSBenchmark"}, say=said.append)["tasks"]
    assert (
        len(said) == 2
        and "up to 512 tokens here, and up to 64 where the model is used" in said[0]
        and said[1].startswith("STSBenchmark")
        and entry["Pairs"] == first["tasks"]["Pairs"]
    )


def test_the_zero_shot_share_is_over_all_scored_tasks(saved, quick, monkeypatch):
    monkeypatch.setattr(candidate, "find_cards", lambda _: [{"recipe": {"base": "x", "data": "y"}}])
    monkeypatch.setattr(candidate, "_lineage", lambda _: "")
    monkeypatch.setattr(candidate, "trained_on", lambda _: {"Lists"})
    shares = [
        evaluate(saved, **quick | {"tasks": task}, say=lambda text: None)["about"]
        for task in ("Lists", "Pairs")
    ]
    assert [about["zero_shot_percent"] for about in shares] == [0, 50]
    assert {about["base"] for about in shares} == {"x"}


def test_another_number_of_soft_tokens_is_another_score(saved, quick, model, tmp_path):
    """The vectors are those of a model with as many; a model without soft tokens has no number."""
    settings = {"pooling": "mean", "dtype": "float32", "device": "cpu"}
    for steps in (2, 4):
        soft = SoftTokens(steps=steps)
        Embedder.from_pretrained(saved, soft_tokens=soft, **settings).save_pretrained(
            tmp_path / f"k{steps}"
        )
    quiet = {"say": lambda text: None}
    two = evaluate(tmp_path / "k2", **quick, **quiet)
    more = evaluate(tmp_path / "k2", **quick, refine_steps=4, **quiet)
    four = evaluate(tmp_path / "k4", **quick, **quiet)
    assert (more["model"], more["about"]["refine_steps"]) == ("k2-4-steps-float32", 4)
    for task in ("Lists", "Pairs"):
        scores = [one["tasks"][task]["main_score"] for one in (two, more, four)]
        assert scores[0] != scores[1] == scores[2]
    for place in (saved, model, "bm25"):
        with pytest.raises(InputError, match="refine_steps: the model has no soft tokens"):
            evaluate(place, **quick, refine_steps=4, **quiet)
    with pytest.raises(InputError, match="refine_steps"):
        evaluate(tmp_path / "k2", **quick, refine_steps=0, **quiet)


def test_another_length_is_another_score(saved, quick):
    whole = evaluate(saved, **quick, say=lambda text: None)
    # the instruction and a few tokens of the text
    cut = evaluate(saved, **quick, max_length=56, say=lambda text: None)
    assert (whole["model"], cut["model"]) == (f"{saved.name}-float32", f"{saved.name}-56-float32")
    assert cut["tasks"]["Pairs"]["main_score"] != whole["tasks"]["Pairs"]["main_score"]
    assert cut["about"]["max_length"] == cut["about"]["template"]["max_length"] == 56
    assert (
        whole["about"]["template"]["max_length"] == 512
        and evaluate(saved, **quick, say=lambda text: None) == whole
    )
    # it has an instruction for its kind
    short = evaluate(saved, **quick, max_length=8, prompts="mteb", say=lambda text: None)
    assert "leaves no room after this instruction" in short["errors"]["Pairs"]


def test_other_weights_and_other_data_are_run(saved, quick, tmp_path, generated):
    first = evaluate(saved, **quick, say=lambda text: None)
    tiny(seed=5).save_pretrained(tmp_path / saved.name)
    second = evaluate(tmp_path / saved.name, **quick, say=lambda text: None)
    assert second["about"]["revision"] != first["about"]["revision"]
    assert second["tasks"]["Pairs"]["main_score"] != first["tasks"]["Pairs"]["main_score"]
    data = tmp_path / "data" / "pairclassification" / "Pairs"
    rows = (generated / "pairclassification" / "Pairs" / "test.jsonl").read_text().splitlines()
    write(data, test=[json.loads(row) for row in rows[:-20]])
    third = evaluate(
        tmp_path / saved.name,
        **quick | {"tasks": "Pairs", "data_dir": tmp_path / "data"},
        say=lambda text: None,
    )
    assert third["tasks"]["Pairs"]["data_revision"] != second["tasks"]["Pairs"]["data_revision"]
    # mteb's own result files, by revision of the weights
    assert len(list((tmp_path / "out" / "results").glob("*/*/Pairs.json"))) == 2


def test_an_evaluation_into_the_model_s_folder_changes_no_revision(quick, tmp_path):
    tiny().save_pretrained(tmp_path / "tiny")
    quick |= {"tasks": "Pairs", "dtype": "auto"}
    for out in (
        tmp_path / "tiny",
        tmp_path,
    ):  # run inside the folder, so that NAME is the folder itself
        first = evaluate(tmp_path / "tiny", **quick | {"out": out}, say=lambda text: None)
        assert (
            evaluate(
                tmp_path / "tiny",
                **quick | {"out": out},
                say=lambda text: pytest.fail("done again"),
            )
            == first
        )


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_queries_file_stops_no_evaluation(saved, quick, content):
    first = evaluate(saved, **quick, say=lambda text: None)
    said = []
    beside = quick["out"] / f"{saved.name}-float32" / "queries.json"
    beside.write_text(content)
    found = evaluate(saved, **quick | {"tasks": "Lists,Pairs,STSBenchmark"}, say=said.append)
    assert (
        found["tasks"].keys() == {"Lists", "Pairs", "STSBenchmark"}
        and found["tasks"]["Lists"] == first["tasks"]["Lists"]
    )
    assert len(said) == 3 and "is no queries.json" in said[0] and not found["errors"]


def test_leftover_vectors_of_other_settings_are_removed(saved, quick):
    folder = quick["out"] / f"{saved.name}-float32"
    (folder / "other").mkdir(parents=True)
    VectorStore(folder / "vectors-0123456789abcdef", 8).database.close()
    evaluate(saved, **quick, say=lambda text: None)
    assert {path.name for path in folder.iterdir()} == {"other", "scores.json", "queries.json"}


@pytest.mark.parametrize("length", [-3, 1])
def test_a_length_without_room_is_refused_before_anything_is_made(tmp_path, quick, length):
    tiny(template="chat").save_pretrained(tmp_path / "chat")
    for model in (tmp_path / "chat", tiny(template="chat")):
        with pytest.raises(InputError, match="max_length"):
            evaluate(model, **quick, max_length=length)
    assert not quick["out"].exists()


def test_length_0_is_the_model_s_own(saved, quick):
    own = evaluate(saved, **quick | {"tasks": "Pairs"}, max_length=0, say=lambda text: None)
    assert (
        own["model"] == f"{saved.name}-own-length-float32"
        and own["about"]["template"]["max_length"] == 64
    )


def test_models_of_one_name_never_mix_and_lose_nothing(quick, tmp_path):
    """Two models whose folders have the same last name, and two dtypes of one of them, in turn."""
    for seed in (1, 2):
        tiny(seed=seed).save_pretrained(tmp_path / f"q{seed}" / "anchor")
    quick |= {"tasks": "Pairs", "dtype": "auto"}
    said = []
    calls = [("q1", {}), ("q2", {}), ("q1", {"dtype": "bfloat16"}), ("q1", {"dtype": "float32"})]
    first = [
        evaluate(tmp_path / q / "anchor", **quick | options, say=said.append)
        for q, options in calls
    ]
    names = [
        "anchor",
        f"anchor-{first[1]['about']['revision']}",
        "anchor-bfloat16",
        "anchor-float32",
    ]
    assert [found["model"] for found in first] == names and {
        path.name for path in quick["out"].glob("[a-q]*")
    } == set(names)
    said = [line for line in said if "tokens here" not in line]
    assert len(said) == 5 and "holds scores of other weights" in said[1] and names[1] in said[1]
    assert [found["about"]["dtype"] for found in first[2:]] == ["bfloat16", "float32"]
    said.clear()
    again = [
        evaluate(tmp_path / q / "anchor", **quick | options, say=said.append)
        for q, options in calls
    ]
    # nothing is run, but the place of the second model's scores is printed again
    assert again == first and len(said) == 1


def test_one_broken_task_does_not_end_the_rest(saved, quick, tmp_path):
    data = tmp_path / "data"
    write(data / "sts" / "STS12", pairs=[{"sentence1": "a", "sentence2": "b", "score": "much"}])
    write(data / "retrieval" / "NFCorpus", queries=[{"_id": "q", "text": "a"}])
    write(
        data / "sts" / "STS13",
        pairs=[{"sentence1": "same", "sentence2": "same", "score": i} for i in range(3)],
    )
    write(
        data / "pairclassification" / "Good",
        test=[
            {"sentence1": w, "sentence2": w[:3], "label": i % 2} for i, w in enumerate(WORDS[:30])
        ],
    )
    scores = evaluate(
        saved,
        **quick | {"tasks": "STS12,NFCorpus,STS13,STS17,Good", "data_dir": data},
        say=lambda text: None,
    )
    assert list(scores["tasks"]) == ["Good"] and list(scores["errors"]) == [
        "STS12",
        "NFCorpus",
        "STS13",
        "STS17",
    ]
    assert (
        "pairs.jsonl:1: score: Input should be a valid number, got 'much'"
        in scores["errors"]["STS12"]
    )
    assert (
        "has no corpus.jsonl" in scores["errors"]["NFCorpus"]
        and "STS17 is not in" in scores["errors"]["STS17"]
    )
    assert "the score is nan" in scores["errors"]["STS13"]
    write(
        data / "sts" / "STS17",
        pairs=[
            {"sentence1": w, "sentence2": w[:3], "score": i % 3} for i, w in enumerate(WORDS[:30])
        ],
    )
    scores = evaluate(
        saved, **quick | {"tasks": "Good,STS17", "data_dir": data}, say=lambda text: None
    )
    assert list(scores["tasks"]) == ["Good", "STS17"] and not scores["errors"]
    kept = read_scores(tmp_path / "out" / f"{saved.name}-float32")
    assert set(kept["errors"]) == {"STS12", "NFCorpus", "STS13"}  # these tasks still have to be run


def test_a_broken_task_folder_is_one_error(saved, quick, tmp_path):
    """Each thing that can be broken: notes, packed file, name, permissions or form."""
    data = tmp_path / "data"
    pairs = [{"sentence1": w, "sentence2": w[:3], "score": i % 3} for i, w in enumerate(WORDS[:30])]
    for name in ("Good", "BadNotes", "BadNotes2", "NotText", "NoTask"):
        write(data / "sts" / name, pairs=pairs)
    (data / "sts" / "BadNotes" / "meta.json").write_text('{"instruction": 5}')
    (data / "sts" / "BadNotes2" / "meta.json").write_bytes(b"\xff\xfe")
    (data / "sts" / "NotText" / "meta.json").mkdir()
    (data / "sts" / "NoTask" / "pairs.jsonl").unlink()
    for name, content in (("Tiny", b"\x1f"), ("Empty", b""), ("Broken", b"\x1f\x8b\x08\x00" * 9)):
        for kind, file in (("sts", "pairs.jsonl.gz"), ("reranking", "test.jsonl.gz")):
            (data / kind / f"{name}{kind}").mkdir(parents=True)
            (data / kind / f"{name}{kind}" / file).write_bytes(content)
        (data / f"{name}Alone").mkdir()
        (data / f"{name}Alone" / "test.jsonl.gz").write_bytes(content)
    scores = evaluate(saved, **quick | {"tasks": None, "data_dir": data}, say=lambda text: None)
    assert list(scores["tasks"]) == ["Good"] and len(scores["errors"]) == 13
    assert "meta.json: instruction: Input should be a valid string" in scores["errors"]["BadNotes"]
    for name, reason in scores["errors"].items():
        assert str(data) in reason and name in reason and "\n" not in reason


def test_an_error_deletes_no_score(saved, quick, tmp_path):
    quick["tasks"] = "Lists,STSBenchmark"
    first = evaluate(saved, **quick, say=lambda text: None)
    folder = tmp_path / "out" / f"{saved.name}-float32"
    kept = {path.name: path.read_text() for path in folder.iterdir()}
    data = tmp_path / "data"
    write(
        data / "pairclassification" / "Good",
        test=[
            {"sentence1": w, "sentence2": w[:3], "label": i % 2} for i, w in enumerate(WORDS[:30])
        ],
    )
    write(data / "reranking" / "Lists", test=[{"query": "a", "positive": [], "negative": ["b"]}])
    for tasks, reason in (
        ("Lists", "positive: List should have at least 1 item"),
        ("STSBenchmark,Good", "STSBenchmark is not in"),
    ):
        failed = evaluate(
            saved, **quick | {"tasks": tasks, "data_dir": data}, say=lambda text: None
        )
        name = tasks.split(",")[0]
        assert reason in failed["errors"][name] and name not in failed["tasks"]
    assert {
        key: value for key, value in read_scores(folder)["tasks"].items() if key != "Good"
    } == first["tasks"]
    assert (folder / "queries.json").read_text() == kept["queries.json"] and not read_scores(
        folder
    )["errors"]
    assert evaluate(saved, **quick, say=lambda text: pytest.fail("it was run again")) == first | {
        "about": read_scores(folder)["about"]
    }


def test_a_model_with_nan_vectors(generated, quick, tmp_path):
    model = tiny()
    with torch.no_grad():
        model.decoder.causal_lm.model.norm.weight[0] = float("nan")
    scores = evaluate(model, **quick, say=lambda text: None)
    assert not scores["tasks"] and set(scores["errors"]) == {"Lists", "Pairs"}
    assert "is not finite" in scores["errors"]["Pairs"] and "diverged" in scores["errors"]["Pairs"]


def test_tasks_of_the_hub_without_a_hub(saved, quick, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    scores = evaluate(saved, **quick | {"tasks": "STS17", "data_dir": None}, say=lambda text: None)
    assert (
        "is it reachable" in scores["errors"]["STS17"] and "data_dir" in scores["errors"]["STS17"]
    )


def test_unknown_names(saved, quick, tmp_path):
    with pytest.raises(InputError, match="did you mean `Pairs`"):
        evaluate(saved, **quick | {"tasks": "Pair"})
    with pytest.raises(InputError, match="cannot load model"):
        evaluate(tmp_path / "nowhere", **quick)
    with pytest.raises(InputError, match="one of paper, mteb"):
        evaluate(saved, **quick, prompts="papers")
    with pytest.raises(InputError, match="no folder"):
        evaluate(saved, **quick | {"data_dir": tmp_path / "nowhere"})


def test_an_adapter_with_its_base(saved, quick, tmp_path):
    """A checkpoint that is an adapter is evaluated with its base, and counts as a model of its own."""
    from anchor_embedding.model.loading import add_lora

    model = Embedder.from_pretrained(saved, dtype="float32")
    add_lora(model.decoder, 4, 8, 0.0)
    with torch.no_grad():
        for name, parameter in model.decoder.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path / "run" / "step-000002")
    assert (tmp_path / "run" / "step-000002" / "adapter_config.json").exists()
    scores = evaluate(tmp_path / "run" / "step-000002", **quick, say=lambda text: None)
    memory = evaluate(model, **quick, say=lambda text: None)
    base = evaluate(saved, **quick, say=lambda text: None)
    assert (
        scores["model"] == "run-step-000002-float32"
        and scores["about"]["revision"] != base["about"]["revision"]
    )
    assert scores["tasks"]["Pairs"]["main_score"] == pytest.approx(
        memory["tasks"]["Pairs"]["main_score"], abs=1e-3
    )
    assert scores["tasks"]["Pairs"]["main_score"] != base["tasks"]["Pairs"]["main_score"]


# ---- vectors are computed once


def test_a_corpus_is_encoded_once_for_all_tasks_that_share_it(saved, tmp_path, monkeypatch):
    for name in ("First", "Second"):
        retrieval(tmp_path / "data" / "retrieval" / name, 60, 10)
    asked = []
    encode_on = encoder.encode_on

    def counted(replicas, texts, instruction, tokens):
        asked.extend((instruction, text) for text in texts)
        return encode_on(replicas, texts, instruction, tokens)

    monkeypatch.setattr(encoder, "encode_on", counted)
    scores = evaluate(
        saved, None, tmp_path / "out", tmp_path / "data", dtype="float32", say=lambda text: None
    )
    assert len(asked) == len(set(asked)) == 70
    assert scores["tasks"]["First"]["main_score"] == scores["tasks"]["Second"]["main_score"]
    left = {path.name for path in (tmp_path / "out" / f"{saved.name}-float32").iterdir()}
    assert left == {"scores.json", "queries.json"}  # the vectors are deleted


@pytest.mark.parametrize("same_code", [True, False])
def test_a_killed_evaluation_goes_on_with_the_vectors_it_had(
    saved, tmp_path, monkeypatch, same_code
):
    retrieval(tmp_path / "data" / "retrieval" / "Long", 60, 10)
    monkeypatch.setattr(encoder, "CHUNK_TEXTS", 16)
    encode_on = encoder.encode_on
    made = []

    def killed(replicas, texts, instruction, tokens):
        made.extend(texts)
        if len(made) > 50:
            raise KeyboardInterrupt
        return encode_on(replicas, texts, instruction, tokens)

    arguments = (saved, None, tmp_path / "out", tmp_path / "data")
    monkeypatch.setattr(encoder, "encode_on", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate(*arguments, dtype="float32", say=lambda text: None)
    before = set(made[:42])
    made[:] = []
    if not same_code:  # the vectors may be other ones now
        monkeypatch.setattr(benchmark, "code_digest", lambda: "another")
    monkeypatch.setattr(
        encoder,
        "encode_on",
        lambda replicas, texts, *rest: made.extend(texts) or encode_on(replicas, texts, *rest),
    )
    scores = evaluate(*arguments, dtype="float32", say=lambda text: None)
    assert (
        scores["tasks"]["Long"]
        and len(before) == 42
        and bool(before & set(made)) != same_code
        and len(made) == (70 - 42 if same_code else 70)
    )


def test_two_processes_do_not_write_the_same_scores(saved, quick):
    from filelock import FileLock

    quick["out"].mkdir()
    with (
        FileLock(quick["out"] / f".{saved.name}-float32.lock"),
        pytest.raises(InputError, match="another process writes to"),
    ):
        evaluate(saved, **quick, say=lambda text: None)
    assert evaluate(saved, **quick, say=lambda text: None)["tasks"]


def test_several_replicas_give_the_scores_of_one(saved, quick, tmp_path):
    one = evaluate(saved, **quick, say=lambda text: None)
    two = evaluate(
        saved, **quick | {"out": tmp_path / "two"}, devices=["cpu", "cpu"], say=lambda text: None
    )
    for name, entry in one["tasks"].items():
        assert two["tasks"][name]["main_score"] == pytest.approx(entry["main_score"], abs=1e-4)


def test_progress_counts_characters_over_all_tasks(saved, quick, monkeypatch, capsys):
    """The bar ends at its total, however many vectors of a task came from the cache."""
    from anchor_embedding.common.progress import LogLines

    bars = []

    class Kept(LogLines):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings, seconds=0)
            bars.append(self)

    monkeypatch.setattr("anchor_embedding.common.progress.LogLines", Kept)
    monkeypatch.setattr("anchor_embedding.common.progress.watched", lambda: False)
    evaluate(saved, **quick | {"progress": None}, say=lambda text: None)
    assert bars[0].n == bars[0].total > 0 and "s left  Pairs" in capsys.readouterr().err


# ---- during a run


def test_a_sweep_of_a_real_run_is_resumable(tmp_path, saved, generated):
    """Stage II on a few pairs with task scores during training, then a sweep over its checkpoints."""
    from anchor_embedding.data.examples import Example
    from anchor_embedding.train.recipe_files import load_recipe
    from anchor_embedding.train.stage import train

    pairs = [
        Example(" ".join(WORDS[i : i + 3]), " ".join(WORDS[i : i + 8]), dataset="fever")
        for i in range(24)
    ]
    settings = [
        f"base={saved}",
        "batch_size=4",
        "max_length=32",
        "steps=4",
        "dtype=float32",
        "warmup_steps=1",
    ]
    settings += ["checkpoint_every=2", "eval_every=2", "instructions=none"]
    run = tmp_path / "run"
    during = TaskEvaluator("Pairs", generated)
    train(
        load_recipe("stage2", settings), run, pairs, during, progress=False, say=lambda text: None
    )
    logged = read_log(run / "evals.jsonl")
    assert [(line["step"], line["task"]) for line in logged] == [
        (0, "Pairs"),
        (2, "Pairs"),
        (4, "Pairs"),
    ]
    swept = sweep(
        run, 2, "Pairs", generated, dtype="float32", progress=False, say=lambda text: None
    )
    found = [scores["tasks"]["Pairs"]["main_score"] for scores in swept]
    assert found == pytest.approx([line["score"] for line in logged[1:]], abs=1e-3)
    # one more line if merged weights round to another score
    lines = read_log(run / "evals.jsonl")
    assert lines[:3] == logged and {line["step"]: line["score"] for line in lines} | {0: 0} == {
        0: 0,
        2: found[0],
        4: found[1],
    }
    said = []
    sweep(run, 2, "Pairs", generated, dtype="float32", progress=False, say=said.append)
    assert [line.split(":")[0] for line in said] == ["== step 2", "== step 4"]
    assert read_log(run / "evals.jsonl") == lines
    # the last checkpoint is not there, as after a run that kept only that of a signal
    shutil.rmtree(run / "step-000004")
    for every, steps in {0: [2, 4], 2: [2]}.items():
        said.clear()
        sweep(run, every, "Pairs", generated, dtype="float32", progress=False, say=said.append)
        heads = [line.split(":")[0] for line in said if line.startswith("==")]
        assert heads == [f"== step {step}" for step in steps]


def test_lines_of_a_sweep_say_unusual_settings_and_replace_only_their_own(
    saved, generated, tmp_path
):
    run = tmp_path / "run"
    tiny().save_pretrained(run / "step-000002")
    usual = {"step": 2, "task": "Pairs", "metric": "max_ap", "score": 0.25}
    (run / "evals.jsonl").write_text(json.dumps(usual) + "\n")
    arguments = {
        "tasks": "Pairs",
        "data_dir": generated,
        "progress": False,
        "say": lambda text: None,
    }
    for _ in range(2):
        swept = [
            sweep(run, 2, **arguments, **settings)[0]
            for settings in ({}, {"prompts": "mteb", "max_length": 56, "dtype": "float32"})
        ]
    lines = read_log(run / "evals.jsonl")
    assert lines[0] == usual and [line["score"] for line in lines[1:]] == [
        found["tasks"]["Pairs"]["main_score"] for found in swept
    ]
    assert lines[1].keys() == usual.keys() | {"data"}
    assert lines[2] == usual | {
        "data": lines[1]["data"],
        "score": lines[2]["score"],
        "prompts": "mteb",
        "max_length": 56,
        "dtype": "float32",
    }


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("final", "anchor-stage2"),
        ("final-96", "anchor-stage2 final-96"),
        ("step-000002", "anchor-stage2 step-000002"),
        ("runs/mine/final", "mine"),
    ],
)
def test_what_a_sweep_scored_has_the_name_of_its_run(tmp_path, model, label):
    run = tmp_path / "anchor-stage2"
    (run / "evaluations" / model.split("/")[-1]).mkdir(parents=True)
    (run / "recipe.toml").touch()
    file = run / "evaluations" / model.split("/")[-1] / "scores.json"
    assert run_label({"model": model}, file) == label
    assert run_label({"model": "final"}) == "ours"


@pytest.mark.thorough
def test_importing_does_not_load_mteb():
    """Importing it takes seconds, so only an evaluation does it."""
    code = (
        "import sys, anchor_embedding.evaluate.sweep, anchor_embedding.evaluate.tasks; "
        "sys.exit(any(m in sys.modules for m in ('mteb', 'datasets')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- real tasks


@needs_data
@pytest.mark.thorough
def test_cheap_real_tasks(tmp_path):
    tiny(template="chat", max_length=96).save_pretrained(tmp_path / "tiny")
    began = time.perf_counter()
    scores = evaluate(
        tmp_path / "tiny", CHEAP, tmp_path / "out", REAL, dtype="float32", progress=False, say=print
    )
    print(scores_table([scores]), f"{time.perf_counter() - began:.0f} s")
    assert list(scores["tasks"]) == list(CHEAP) and not scores["errors"]
    assert [entry["metric"] for entry in scores["tasks"].values()] == [
        "cosine_spearman",
        "max_ap",
        "map_at_1000",
    ]


@needs_data
@pytest.mark.parametrize("name", CHEAP)
def test_cheap_real_tasks_agree_with_mteb(name):
    entry, theirs = agrees(tiny(), REAL, name)
    assert entry["main_score"] == pytest.approx(theirs, abs=1e-4)


@needs_data
@pytest.mark.slow
def test_every_real_task(tmp_path):
    """Every folder runs with a tiny model and gives the scores of mteb's own run on the same
    vectors.
    """
    names = [path.name for kind in REAL.iterdir() if kind.is_dir() for path in kind.iterdir()]
    tiny(template="chat", max_length=96).save_pretrained(tmp_path / "tiny")
    scores = evaluate(
        tmp_path / "tiny", None, tmp_path / "out", REAL, dtype="float32", progress=False, say=print
    )
    assert set(scores["tasks"]) == set(names) and not scores["errors"]


@needs_data
@pytest.mark.slow
def test_every_real_task_agrees_with_mteb():
    for task in local_tasks(REAL):
        entry, theirs = agrees(tiny(), REAL, task.metadata.name)
        print(f"{task.metadata.name:32}{entry['main_score']:.4f} {theirs:.4f}")
        assert entry["main_score"] == pytest.approx(theirs, abs=1e-4), task.metadata.name
