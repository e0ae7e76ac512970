"""No text that a run is evaluated on is trained on, whatever the data: the tests look at what
`train` is given and what is encoded.
"""

import json
from dataclasses import replace
from functools import partial
from importlib import metadata
from unittest import mock

import pytest
from packaging.requirements import Requirement

from anchor_embedding.common.errors import InputError
from anchor_embedding.common.tiny import PROSE
from anchor_embedding.data import docstrings
from anchor_embedding.data.docstrings import HELDOUT, TRAINING, docstring_pairs, heldout_part
from anchor_embedding.embed.embedder import Embedder
from anchor_embedding.evaluate import heldout
from anchor_embedding.study import arms
from anchor_embedding.study.pipeline import run_pipeline
from anchor_embedding.study.tournament import tournament
from anchor_embedding.train.recipe_files import load_recipe

WORDS = PROSE.split()


def words(start, number):
    return " ".join(WORDS[(start + i) % len(WORDS)] for i in range(number))


def write_pairs(path):
    """Forty pairs that share their texts: one positive for two queries, positives that differ only
    in case or spaces, a positive that is also a query, and positives of other pairs as negatives.
    """
    documents = [f"{words(3 * i, 9)} {i}" for i in range(30)]
    rows = [
        {
            "query": f"{words(5 * i, 4)}?",
            "positive": text,
            "negatives": [documents[i - 1], documents[i - 2].upper()],
        }
        for i, text in enumerate(documents)
    ]
    rows += [
        {
            "query": f"again {words(7 * i, 3)}",
            "positive": f"  {documents[i].title()}",
            "negatives": [documents[i + 9]],
        }
        for i in range(5)
    ]
    rows += [
        {"query": documents[i].replace(" ", "  "), "positive": f"an answer to {i}", "negatives": []}
        for i in range(5, 10)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(way, data, base, out):
    """Runs a pipeline or a tournament on pairs of this source."""
    settings = [f"base={base}", f"data={data}", "batch_size=8", "max_length=24", "dtype=float32"]
    quiet = {"progress": False, "say": lambda text: None}
    if way == "pipeline":
        more = ["steps=2", "evaluation.pairs=15", "evaluation.every=2"]
        run_pipeline(load_recipe("quickstart", [*settings, *more]), out, **quiet)
    else:
        tournament(["baseline"], out, amount=2, every=1, overrides=settings, heldout=15, **quiet)


@pytest.fixture
def seen():
    """The pairs that were trained on, and the texts that were encoded, which is done only in
    evaluation.
    """
    trained = []
    evaluated = set()
    train = arms.train
    encode = Embedder.encode

    def watched_train(recipe, out, examples, *arguments, **settings):
        trained.extend(examples)
        return train(recipe, out, examples, *arguments, **settings)

    def watched_encode(embedder, texts, *arguments, **settings):
        evaluated.update([texts] if isinstance(texts, str) else texts)
        return encode(embedder, texts, *arguments, **settings)

    few = partial(docstring_pairs, packages=["joblib", "peft"])
    with (
        mock.patch.object(arms, "train", watched_train),
        mock.patch.object(Embedder, "encode", watched_encode),
        mock.patch.object(heldout, "docstring_pairs", few),
    ):
        yield trained, evaluated


def plain_texts(texts):
    return {" ".join(text.casefold().split()) for text in texts}


@pytest.mark.parametrize("way", ["pipeline", "tournament"])
@pytest.mark.parametrize("data", [pytest.param("docstrings", marks=pytest.mark.thorough), "pairs"])
def test_no_judged_text_is_trained_on(seen, base, tmp_path, way, data):
    if data == "pairs":
        write_pairs(tmp_path / "pairs.jsonl")
    run(way, tmp_path / "pairs.jsonl" if data == "pairs" else data, base, tmp_path / "out")
    trained = seen[0]
    evaluated = plain_texts(seen[1])
    assert len(evaluated) >= 10 and len(trained) >= 8, "training and evaluation must both have run"
    for side in (
        lambda pair: [pair.query],
        lambda pair: [pair.positive],
        lambda pair: pair.negatives,
    ):
        assert not evaluated & plain_texts(text for pair in trained for text in side(pair))


def texts_of(pairs):
    return plain_texts(text for pair in pairs for text in (pair.query, pair.positive))


def add_requirements(name, found):
    """Adds the distributions that `name` needs at run time, itself among them."""
    distribution = metadata.distribution(name)
    if distribution.name in found:
        return
    found[distribution.name] = distribution
    for line in distribution.requires or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            add_requirements(requirement.name, found)


def test_every_machine_has_the_usual_packages():
    found = {}
    add_requirements("anchor_embedding", found)
    paths = [file for distribution in found.values() for file in distribution.files or []]
    names = {path.parts[0].removesuffix(".py") for path in paths}
    assert {*TRAINING, *HELDOUT} <= names
    assert not set(TRAINING) & set(HELDOUT)


def test_another_installed_package_does_not_change_the_pairs(tmp_path, monkeypatch):
    def install(name):
        """A package of ten functions with docstrings of their own."""
        lines = [
            f'def f{i}():\n    """{name} {words(3 * i, 4)} {i}.\n\n    {name} {words(9 * i, 9)} {i}\n    """\n'
            for i in range(10)
        ]
        (tmp_path / f"{name}.py").write_text("\n".join(lines))

    monkeypatch.setattr(docstrings, "_site_packages", lambda: [tmp_path])
    for name in ("numpy", "torch", "click"):
        install(name)
    before = docstring_pairs(cache=False)
    install("stranger")
    assert docstring_pairs(cache=False) == before and set(before.packages) == {
        "click", "numpy", "torch"
    }  # fmt: skip
    assert len(before.train) == 20 and len(before.heldout) == 10
    assert len(docstring_pairs(tmp_path, cache=False).train) == 30


@pytest.mark.thorough
def test_parts_of_docstrings_are_different_packages():
    split = heldout.split_pairs("docstrings", 60, 42)
    assert set(split.source["packages"]) <= {*TRAINING, *HELDOUT}
    again = heldout.split_pairs("docstrings", 60, 42)
    assert (split.heldout, split.development) == (again.heldout, again.development) and len(
        split.heldout
    ) == len(split.development) == 60
    assert (
        not set(split.clusters) & set(split.development_clusters) and len(set(split.clusters)) > 4
    )
    assert {heldout_part(name) for name in split.clusters} == {"test"}
    assert {heldout_part(name) for name in split.development_clusters} == {"development"}
    # another seed draws other pairs of the same packages
    other = heldout.split_pairs("docstrings", 60, 43)
    assert other.heldout != split.heldout and not set(other.clusters) & set(
        split.development_clusters
    )
    assert not texts_of(split.heldout) & texts_of(split.development)
    assert not texts_of(split.train) & (texts_of(split.heldout) | texts_of(split.development))


def test_parts_of_a_file_are_different_documents(tmp_path):
    write_pairs(tmp_path / "pairs.jsonl")
    split = heldout.split_pairs(tmp_path / "pairs.jsonl", 8, 0)
    assert split.source == json.loads(json.dumps(split.source))  # it becomes part of a report
    assert split.heldout == heldout.split_pairs(tmp_path / "pairs.jsonl", 8, 0).heldout
    assert 2 <= len(split.development) <= 8 and not texts_of(split.heldout) & texts_of(
        split.development
    )
    assert not texts_of(split.train) & (texts_of(split.heldout) | texts_of(split.development))
    chosen = split.part("development")
    assert (
        chosen.heldout == split.development
        and chosen.source["judged_by"] == "development"
        and split.part("test") is split
    )
    with pytest.raises(InputError, match="must be test or development"):
        split.part("training")
    with pytest.raises(InputError, match="there is no development part"):
        heldout.split_pairs(tmp_path / "pairs.jsonl", 8, 0, with_development=False).part(
            "development"
        )


@pytest.mark.parametrize(
    ("pairs", "documents", "most"),
    [(100, 100, 20), (100, 5, 50), (9, 9, 4)],  # a fifth; half, as a fifth is one document; few
)
def test_most_of_a_small_file_is_trained_on(tmp_path, pairs, documents, most):
    path = tmp_path / "pairs.jsonl"
    rows = [{"query": f"query {i}", "positive": f"text {i % documents}"} for i in range(pairs)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for with_development in (True, False):
        split = heldout.split_pairs(path, 60, 42, with_development=with_development)
        assert heldout.several_documents(split.heldout) and len(split.heldout) <= most
        assert len(split.development) <= most * with_development
        used = len(split.train) + len(split.heldout) + len(split.development)
        assert used == pairs and not texts_of(split.train) & texts_of(split.heldout)


def test_a_search_among_one_document_is_refused(tmp_path):
    # three pairs of one document are within the part, the others are too many
    rows = [{"query": f"query {i}", "positive": f"Text {i < 3}."} for i in range(50)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    needed = (
        "at least 4 are needed, of different documents, two of which have at most half of all; "
    )
    with pytest.raises(InputError, match=f"{needed}the two smallest have 50$"):
        heldout.split_pairs(path, 10, 42)


def write_documents(path, sizes):
    """Pairs with as many questions about each document."""
    rows = [
        {"query": f"question {i} about {document}", "positive": f"the text of {document}"}
        for document, size in enumerate(sizes)
        for i in range(size)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_documents_that_do_not_fit_into_the_held_out_number_are_named(tmp_path):
    file = tmp_path / "handbook.jsonl"
    write_documents(file, [100] * 10)
    with pytest.raises(InputError, match="the two smallest have 200; hold") as told:
        heldout.split_pairs(str(file), 160, seed=0)
    assert "at least 4" not in str(told.value)
    split = heldout.split_pairs(str(file), 200, seed=0)  # the remedy
    assert {pair.positive for pair in split.train}.isdisjoint(p.positive for p in split.heldout)
    assert len(split.heldout) == 200


def test_pairs_that_are_never_held_out_are_named(tmp_path):
    said = []
    write_documents(tmp_path / "pairs.jsonl", [90] + [1] * 110)
    split = heldout.split_pairs(str(tmp_path / "pairs.jsonl"), 20, seed=0, say=said.append)
    assert len(split.heldout) == 20
    assert any("90 pairs of documents with more than 20 pairs each" in line for line in said)
    said.clear()
    write_documents(tmp_path / "few.jsonl", [2] * 50)
    heldout.split_pairs(str(tmp_path / "few.jsonl"), 20, seed=0, say=said.append)
    assert not said


def test_a_tournament_is_judged_by_the_part_that_is_named(seen, base, tmp_path):
    write_pairs(tmp_path / "pairs.jsonl")
    split = heldout.split_pairs(tmp_path / "pairs.jsonl", 8, 42)
    settings = [
        f"base={base}",
        f"data={tmp_path / 'pairs.jsonl'}",
        "batch_size=8",
        "max_length=24",
        "dtype=float32",
    ]
    for part, pairs, hidden in (
        ("test", split.heldout, split.development),
        ("development", split.development, split.heldout),
    ):
        seen[1].clear()
        report = tournament(
            ["baseline"],
            tmp_path / part,
            amount=2,
            every=1,
            overrides=settings,
            heldout=8,
            part=part,
            progress=False,
            say=str,
        )
        evaluated = plain_texts(seen[1])
        assert evaluated == texts_of(pairs) and not evaluated & texts_of(hidden)
        assert report["card"]["judged_by"] == part


def test_a_pipeline_without_stage_1_trains_on_what_it_would_hold_out_for_it(base, tmp_path):
    """Every pair is trained on or held out for the scores, and the log says how many are which."""
    rows = [
        {"query": f"what is {words(i, 5)} {i}?", "positive": f"{words(3 * i, 6)} {i}"}
        for i in range(40)
    ]
    rows[0]["score"] = 0.1
    (tmp_path / "data").mkdir()
    for name, part in (("train", rows[:30]), ("val", rows[30:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / "data" / f"{name}.jsonl").write_text(text)
    (tmp_path / "data" / "more.tsv").write_text("query\tpositive\n")
    shared = [f"base={base}", f"data={tmp_path / 'data'}", "batch_size=8", "max_length=24"]
    shared += ["steps=2", "evaluation.pairs=8", "evaluation.every=2", "dtype=float32"]
    for name, counts in (
        ("baseline", "32 pairs to train on, 8 held out"),
        ("quickstart", "24 pairs to train on, 8 held out for the scores and 8 for the gain"),
    ):
        said = []
        pipeline = load_recipe("quickstart", shared)
        if name == "baseline":
            stage = pipeline.stages["stage2"]
            pipeline = replace(pipeline, stages={"stage2": stage}, arms={"baseline": ("stage2",)})
        run_pipeline(pipeline, tmp_path / name, progress=False, say=said.append)
        assert any(line.startswith(counts) for line in said), said
        assert any(line.endswith("may be a test split: val.jsonl") for line in said), said
        assert any(line.endswith("data: not read: more.tsv") for line in said), said
        assert any("data: fields that are not read: score; every row" in line for line in said), (
            said
        )
