"""`anchor mine` from end to end: mined negatives reach the loss, models of every kind mine, memory
stays flat, and nothing half-written is left.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from filelock import FileLock

from anchor_embedding.cli.main import main
from anchor_embedding.common.errors import InputError
from anchor_embedding.common.tiny import tiny_model, tiny_tokenizer
from anchor_embedding.data.batches import Instructions, tokenize_batch
from anchor_embedding.data.docstrings import docstring_pairs
from anchor_embedding.data.sources import read_examples
from anchor_embedding.embed.candidates import CosineScores
from anchor_embedding.embed.corpus import Corpus, CorpusSettings, encode_corpus
from anchor_embedding.embed.embedder import Embedder
from anchor_embedding.embed.export import export_embedder
from anchor_embedding.embed.mining import MiningSettings, mine_negatives
from anchor_embedding.embed.vectors import unit
from anchor_embedding.evaluate.retrieval import HeldoutRetrieval
from anchor_embedding.train.recipe_files import load_recipe
from anchor_embedding.train.stage import train

QUIET = {"progress": False, "say": lambda text: None}


@pytest.fixture(scope="module")
def docstrings():
    """Pairs of numpy, and held-out pairs of tqdm."""
    return docstring_pairs(packages=["numpy", "tqdm"], heldout=["tqdm"])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, docstrings):
    """A file of 240 pairs."""
    path = tmp_path_factory.mktemp("pairs") / "numpy.jsonl"
    rows = [{"query": pair.query, "positive": pair.positive} for pair in docstrings.train[:240]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def mined(pairs):
    """The same pairs with negatives that the command mined with BM25."""
    out = pairs.parent / "mined" / "numpy.jsonl"
    assert main(["mine", "--data", str(pairs), "--out", str(out), "--num-negatives", "4"]) == 0
    return out


def small(data, base, *more):
    """A small Stage II recipe."""
    settings = [
        f"data={data}",
        f"base={base}",
        "tuning=full",
        "steps=6",
        "batch_size=16",
        "max_length=48",
        "warmup_steps=1",
        "instructions=none",
    ]
    return load_recipe("stage2", [*settings, "learning_rate=2e-3", "dtype=float32", *more])


def first_batch(data, base, capsys, *more):
    """The loss terms that `anchor train --dry-run` prints."""
    settings = [
        "tuning=full",
        "batch_size=16",
        "max_length=48",
        "instructions=none",
        "dtype=float32",
        f"data={data}",
        f"base={base}",
        *more,
    ]
    assert (
        main(
            [
                "train",
                "stage2",
                "--dry-run",
                *(word for item in settings for word in ("--set", item)),
            ]
        )
        == 0
    )
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_card_tells_what_was_done(pairs, mined, capsys):
    card = json.loads((mined.parent / "numpy.jsonl.card.json").read_text())
    examples = read_examples(mined)
    assert [(e.query, e.positive) for e in examples] == [
        (e.query, e.positive) for e in read_examples(pairs)
    ]
    assert (
        card["model"] == "bm25" and card["settings"]["num_negatives"] == 4 and card["rows"] == 240
    )
    figures = card["datasets"]["numpy"]
    assert figures["negatives"] == sum(len(e.negatives) for e in examples) > 600
    assert figures["fewer"] == sum(len(e.negatives) < 4 for e in examples) and figures[
        "none"
    ] == sum(not e.negatives for e in examples)
    assert figures["margin"] >= 0.05 * figures["negative_score"] > 0
    # mine again, replacing the first result
    again = ["mine", "--data", str(pairs), "--out", str(mined), "--num-negatives", "4", "--json"]
    assert main(again) == 2
    assert f"{mined} already exists; name another file, or replace" in capsys.readouterr().err
    assert main([*again, "--force"]) == 0
    assert json.loads(capsys.readouterr().out) == card


def test_mined_negatives_reach_infonce(pairs, mined, base, capsys):
    """With negatives, the same 16 pairs have as many more texts; each competes for every query, and
    the loss changes.
    """
    plain = first_batch(pairs, base, capsys)
    none = first_batch(mined, base, capsys, "hard_negatives=0")
    assert (
        plain["infonce"] == pytest.approx(none["infonce"], rel=1e-6)
        and plain["negatives"] == none["negatives"] == 0
    )
    found = {n: first_batch(mined, base, capsys, f"hard_negatives={n}") for n in (1, 4)}
    assert 12 <= found[1]["negatives"] <= 16 < found[4]["negatives"] <= 64
    for n in (1, 4):
        assert found[n]["texts"] == 32 + found[n]["negatives"]
        assert found[n]["candidates"] == plain["candidates"] + found[n]["negatives"]
    # every competing text adds to the sum in the denominator
    assert plain["infonce"] < found[1]["infonce"] < found[4]["infonce"]


def test_training_takes_the_hardest_first(mined, base):
    examples = read_examples(mined)
    batch = tokenize_batch(
        examples,
        Embedder.from_pretrained(base).tokenizer,
        Instructions.none(),
        range(8),
        hard_negatives=2,
    )
    alone = tokenize_batch(
        examples,
        Embedder.from_pretrained(base).tokenizer,
        Instructions.none(),
        range(8),
        hard_negatives=1,
    )
    assert [row[:1] for row in batch.negatives] == alone.negatives and any(
        len(row) == 2 for row in batch.negatives
    )


@pytest.mark.thorough
def test_training_on_mined_pairs_learns_as_well(pairs, mined, base, docstrings, tmp_path):
    """After twenty steps, with and without the negatives, a tiny model must fit its pairs better
    than before; the test claims no more.
    """
    train_pairs = read_examples(pairs)[:120]
    retrieval = HeldoutRetrieval([e.query for e in train_pairs], [e.positive for e in train_pairs])
    untrained = retrieval(Embedder.from_pretrained(base, max_length=48).encode)["mrr"]
    for data, hard in ((pairs, 0), (mined, 2)):
        run = tmp_path / f"run{hard}"
        train(small(data, base, f"hard_negatives={hard}", "steps=20"), run, **QUIET)
        assert retrieval(Embedder.from_pretrained(run / "final").encode)["mrr"] > 1.2 * untrained
        card = json.loads((run / "card.json").read_text())
    assert (
        card["fingerprint"]
        == json.loads((mined.parent / "numpy.jsonl.card.json").read_text())["fingerprint"]
    )


@pytest.mark.thorough
def test_every_kind_of_model_mines(pairs, base, tmp_path):
    """A run, its result and an exported model, also read by sentence-transformers alone: the same
    weights give the same negatives.
    """
    run = tmp_path / "run"
    train(small(pairs, base, "hard_negatives=0", "steps=2"), run, **QUIET)
    embedder = Embedder.from_pretrained(run / "final", dtype="float32")
    prompt = "Find the documentation of what is asked"  # the exported model adds it by itself
    exported = export_embedder(
        embedder, tmp_path / "exported", instructions={"query": prompt}, base="some/base"
    )
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for path in exported.iterdir():
        if path.name not in ("anchor_embedding.json", "bare_tokenizer"):
            (foreign / path.name).symlink_to(path)
    with_prompt = {"instructions": Instructions("test", {"numpy": (prompt,)})}
    models = {
        "run": run,
        "final": run / "final",
        "memory": embedder,
        "exported": exported,
        "foreign": foreign,
    }
    found = {
        name: mine_negatives(
            pairs,
            tmp_path / f"{name}.jsonl",
            model,
            **({} if name == "foreign" else with_prompt | {"dtype": "float32"}),
            **QUIET,
        )
        for name, model in models.items()
    }
    texts = {name: [e.negatives for e in read_examples(mined.out)] for name, mined in found.items()}
    assert any(texts["run"])
    for name in ("final", "memory", "exported"):
        assert texts[name] == texts["run"]
    same = np.mean([set(a) == set(b) for a, b in zip(texts["foreign"], texts["run"], strict=True)])
    assert same > 0.95  # computed in padded batches, so the last digits differ
    assert (
        found["run"].card["revision"]
        == found["final"].card["revision"]
        != found["foreign"].card["revision"]
    )


def test_instructions_and_a_foreign_model(pairs, base, tmp_path):
    exported = export_embedder(
        Embedder.from_pretrained(base), tmp_path / "exported", base="some/base"
    )
    (exported / "anchor_embedding.json").unlink()
    instructions = tmp_path / "instructions.csv"
    instructions.write_text("dataset,instruction,symmetric\nnumpy,Find the documentation,0\n")
    assert (
        main(
            [
                "mine",
                "--data",
                str(pairs),
                "--out",
                str(tmp_path / "x.jsonl"),
                "--model",
                str(exported),
                "--instructions",
                str(instructions),
            ]
        )
        == 2
    )
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("x", ".x"))]
    assert (
        main(
            [
                "mine",
                "--data",
                str(pairs),
                "--out",
                str(tmp_path / "y.jsonl"),
                "--model",
                str(base),
                "--instructions",
                str(instructions),
            ]
        )
        == 0
    )
    assert json.loads((tmp_path / "y.jsonl.card.json").read_text())["instructions"] == str(
        instructions
    )


def test_datasets_stay_apart(tmp_path):
    """Documents of one dataset are not negatives in another, and rows keep their dataset."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("one", "two"):
        rows = [
            {"query": f"{name} question {i}", "positive": f"{name} answer {i % 9}"}
            for i in range(30)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mined = mine_negatives(
        folder,
        tmp_path / "mined.jsonl",
        settings=MiningSettings(num_negatives=3, relative_margin=None),
        **QUIET,
    )
    examples = read_examples(mined.out)
    assert [e.dataset for e in examples] == ["one"] * 30 + ["two"] * 30
    for example in examples:
        assert len(example.negatives) == 3 and all(
            text.startswith(example.dataset) for text in example.negatives
        )
    assert {name: figures["documents"] for name, figures in mined.card["datasets"].items()} == {
        "one": 9,
        "two": 9,
    }


MEMORY = """
import json, re, sys
import numpy as np
from anchor_embedding.embed.candidates import CosineScores
from anchor_embedding.embed.mining import MiningSettings, mine_negatives
most = 0
def encode(texts):
    global most
    most = max(most, int(re.search(r"RssAnon:\\s*(\\d+) kB", open("/proc/self/status").read())[1]))
    return np.random.default_rng(len(texts)).normal(size=(len(texts), 512)).astype(np.float32)
*sources, out = sys.argv[1:]
scorer, found = CosineScores(encode, encode, queries=256, documents=512), []
for source in sources:
    settings = MiningSettings(range_max=20)
    mine_negatives(source, out, scorer, settings, force=True, progress=False, say=lambda text: None)
    found.append(most / 1024)
print(json.dumps(found))
"""


def run_python(code, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def write_many(path, rows, words):
    path.write_text(
        "".join(
            json.dumps({"query": f"question {i}", "positive": f"answer {i} " + "word " * words})
            + "\n"
            for i in range(rows)
        )
    )
    return path


@pytest.mark.thorough
@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="the memory of a process is read from /proc"
)
def test_memory_does_not_hold_the_corpus(tmp_path):
    """Three times as many pairs have 30 MB more of texts and 37 MB more of document vectors; memory
    grows by less than a third of that.
    """
    few = write_many(tmp_path / "few.jsonl", 9_000, 320)
    many = write_many(tmp_path / "many.jsonl", 27_000, 320)
    process = run_python(MEMORY, few, many, tmp_path / "out.jsonl")
    out, error = process.communicate(timeout=280)
    assert process.returncode == 0, error
    before, after = json.loads(out.splitlines()[-1])
    assert 0 < before <= after < before + 22


SLOW = """
import sys, time
import numpy as np
from anchor_embedding.embed.candidates import CosineScores
from anchor_embedding.embed.mining import mine_negatives
def encode(texts):
    print("encoding", flush=True)
    time.sleep(60)
scorer = CosineScores(encode, encode)
mine_negatives(sys.argv[1], sys.argv[2], scorer, force=True, progress=False)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "stop", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_a_stopped_search_leaves_the_earlier_result(pairs, tmp_path, stop):
    out = tmp_path / "mined.jsonl"
    out.write_text("earlier\n")
    process = run_python(SLOW, pairs, out)
    assert process.stdout.readline().strip() == "encoding"
    os.kill(process.pid, stop)
    process.communicate(timeout=120)
    assert process.returncode != 0 and out.read_text() == "earlier\n"
    left = {path.name for path in tmp_path.iterdir()} - {"mined.jsonl"}
    assert not left if stop == signal.SIGINT else all(name.startswith(".mined.") for name in left)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-negatives", "0"], "`num_negatives` = 0: must be at least 1"),
        (["--range-min", "98"], "leave no room for 5 negatives"),
        (["--relative-margin", "-1"], "`relative_margin` = -1.0: must be at least 0"),
        (["--relative-margin", "nan"], "`relative_margin` = nan: must be finite"),
        (["--model", "no-such-folder/model"], "no-such-folder/model"),
        (["--instructions", "none.txt"], "instructions are read from .csv or .toml"),
        (["--corpus", "no-such-file.txt"], "no-such-file.txt: there is no such file or folder"),
        (["--corpus", os.devnull], "is a pipe or a device"),
        (["--corpus", "mined.jsonl"], "the corpus would be replaced"),
        (["--out", "pairs.tsv"], "written as .jsonl or .jsonl.gz"),
    ],
)
def test_bad_input_is_one_line(pairs, tmp_path, capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert main(["mine", "--data", str(pairs), "--out", "mined.jsonl", *arguments]) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("anchor: ")]
    assert len(lines) == 1 and words in lines[0] and not printed.out
    assert not list(tmp_path.iterdir())


def test_a_corpus_may_be_a_table(pairs, tmp_path):
    texts = ["A rope, to tie a knot.", "An anchor for a small boat, of steel."]
    (tmp_path / "lines.txt").write_text("".join(f"{text}\n" for text in texts))
    table = "".join(f'{number},"{text}"\n' for number, text in enumerate(texts))
    (tmp_path / "table.csv").write_text("id,text\n" + table)
    mined = [
        mine_negatives(pairs, tmp_path / f"{name}.jsonl", corpus=tmp_path / name, progress=False)
        for name in ("lines.txt", "table.csv")
    ]
    assert mined[0].out.read_bytes() == mined[1].out.read_bytes()
    assert mined[0].card["corpus_texts"] == 2
    (tmp_path / "table.csv").rename(tmp_path / "table.xml")
    with pytest.raises(InputError, match=r"table.xml: unknown kind of file; texts are read from"):
        mine_negatives(pairs, tmp_path / "x.jsonl", corpus=tmp_path / "table.xml", progress=False)


def test_an_empty_name_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in (["mine", "--data", "", "--out", "mined.jsonl"], ["check", "--data", ""]):
        assert main(arguments) == 2
        assert "anchor: no data are named; give the path of your data" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_bad_rows_stop_or_are_left_out(tmp_path, capsys):
    path = tmp_path / "pairs.csv"
    path.write_text(
        "question,answer\nhow to sort a list,Call sort on the list.\nhow to open,\nto "
        "get a sorted list,Call sorted on the list.\n"
    )
    assert main(["mine", "--data", str(path), "--out", str(tmp_path / "mined.jsonl")]) == 2
    assert "pairs.csv:3: 'answer' is empty" in capsys.readouterr().err
    assert (
        main(
            [
                "mine",
                "--data",
                str(path),
                "--out",
                str(tmp_path / "mined.jsonl"),
                "--on-bad-row",
                "skip",
            ]
        )
        == 0
    )
    assert [e.negatives for e in read_examples(tmp_path / "mined.jsonl")] == [
        ("Call sorted on the list.",),
        ("Call sort on the list.",),
    ]


def test_the_margin_can_be_left_out(pairs, tmp_path, capsys):
    found = {}
    for margin in ("none", "0", "0.05"):
        assert (
            main(
                [
                    "mine",
                    "--data",
                    str(pairs),
                    "--out",
                    str(tmp_path / f"{margin}.jsonl"),
                    "--relative-margin",
                    margin,
                    "--json",
                ]
            )
            == 0
        )
        card = json.loads(capsys.readouterr().out)
        assert card["settings"]["relative_margin"] == (None if margin == "none" else float(margin))
        found[margin] = card["datasets"]["numpy"]
    assert [found[margin]["too_close"] > 0 for margin in found] == [False, True, True]
    assert found["none"]["negatives"] > found["0"]["negatives"] > found["0.05"]["negatives"]
    with pytest.raises(SystemExit):
        main(
            [
                "mine",
                "--data",
                str(pairs),
                "--out",
                str(tmp_path / "x.jsonl"),
                "--relative-margin",
                "some",
            ]
        )
    assert "'some' is neither a number nor none" in capsys.readouterr().err


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit):
        main(["mine", "--help"])
    text = capsys.readouterr().out
    assert all(
        "--" + name.replace("_", "-") in text for name in MiningSettings.__dataclass_fields__
    )


def test_a_corpus_has_its_titles_as_the_positives_have(tmp_path):
    """Compared without its title, a positive would be the hardest negative of its own query."""
    task = tmp_path / "ships"
    (task / "qrels").mkdir(parents=True)
    documents = [
        {"_id": "a", "title": "Anchor", "text": "holds the ship in deep water"},
        {"_id": "s", "title": "Sail", "text": "drives the ship"},
    ]
    (task / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    (task / "queries.jsonl").write_text(
        json.dumps({"_id": "q", "text": "what holds the ship in deep water"}) + "\n"
    )
    (task / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\n")
    found = mine_negatives(
        task,
        tmp_path / "mined.jsonl",
        settings=MiningSettings(relative_margin=None),
        corpus=task / "corpus.jsonl",
        **QUIET,
    )
    assert [e.negatives for e in read_examples(found.out)] == [("Sail drives the ship",)]


def test_more_negatives_than_documents(pairs, tmp_path):
    settings = MiningSettings(num_negatives=10**12, range_max=10**12, relative_margin=None)
    mined = mine_negatives(pairs, tmp_path / "all.jsonl", settings=settings, **QUIET)
    assert (
        max(len(example.negatives) for example in read_examples(mined.out)) < 240
        and mined.card["datasets"]["numpy"]["negatives"] > 0
    )


def test_nothing_found_is_said(pairs, tmp_path, capsys):
    assert (
        main(
            [
                "mine",
                "--data",
                str(pairs),
                "--out",
                str(tmp_path / "none.jsonl"),
                "--max-score",
                "-1",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().err
    assert "no negative was found for any query" in printed and "train with" not in printed


def test_interrupted_says_what_was_not_written(pairs, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("anchor_embedding.embed.mining.read_pool", interrupted)
    assert main(["mine", "--data", str(pairs), "--out", str(tmp_path / "none.jsonl")]) == 130
    assert "none.jsonl was not written" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


# ---- documents encoded before


class Steady(Embedder):
    """The vector of a text depends only on its first word, bit for bit and in every batch; texts
    with the same first word tie.
    """

    encoded = ()

    def encode(self, texts, instruction=None, *_, normalize=False, **__):
        if isinstance(texts, str):
            return self.encode([texts], normalize=normalize)[0]
        self.encoded += (*texts,)
        vectors = np.stack([self._vector(text) for text in texts])
        return unit(vectors) if normalize else vectors

    def _vector(self, text):
        word = (text.casefold().split() or [""])[0]
        random = np.random.default_rng([*word.encode()])
        return random.normal(size=self.dimension).astype(np.float32)


class SmallBlocks(CosineScores):
    def __init__(self, encode_query, encode_document, device):
        super().__init__(encode_query, encode_document, device, queries=7, documents=11)


@pytest.fixture(scope="module")
def steady(base):
    model = Embedder.from_pretrained(base, dtype="float32")
    return Steady(model.decoder, model.tokenizer)


def write_rows(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def many_cases(tmp_path_factory):
    """Two datasets and 103 documents. The documents have few different first words, so they tie;
    some are a positive (unchanged or spelled differently), a query, a negative, another document,
    or blank.
    """
    folder = tmp_path_factory.mktemp("cases")
    chance = random.Random(0)
    rows = {
        name: [
            {
                "query": f"w{chance.randrange(12)} question {i // 2}",
                "positive": f"w{chance.randrange(12)} {name} answer {i % 17}",
                "negatives": [f"w{chance.randrange(12)} wrong {i % 5}"],
            }
            for i in range(40)
        ]
        for name in ("one", "two")
    }
    for name in rows:
        write_rows(folder / "pairs" / f"{name}.jsonl", rows[name])
    texts = [f"w{i % 12} document {i}" for i in range(60)]
    texts += [rows["one"][i]["positive"] for i in range(12)]
    texts += [rows["two"][i]["positive"].upper().replace(" ", "  ") for i in range(12)]
    texts += [rows["one"][i]["query"] for i in range(6)]
    texts += [rows["two"][i]["negatives"][0] for i in range(4)]
    texts += ["W3  DOCUMENT 3", "w3 document 3", "", "w3 Document 3", "w3 document 3", " \t"]
    texts += [f"untitled {i}" for i in range(3)]
    chance.shuffle(texts)
    documents = [{"id": f"d{i}", "text": text} for i, text in enumerate(texts)]
    titled = [row | {"title": "w5"} if row["text"][:8] == "untitled" else row for row in documents]
    write_rows(folder / "documents.jsonl", titled)
    return folder


def shards(steady, many_cases, out, **settings):
    settings = CorpusSettings(**({"shard_size": 10} | settings))
    encode_corpus(steady, many_cases / "documents.jsonl", out, settings, progress=False)
    return out


def outcome(mined):
    """The things that must not differ: the file and the figures."""
    return mined.out.read_bytes(), mined.card["datasets"], mined.card["fingerprint"]


CHOICES = {
    "top": {"num_negatives": 3, "range_max": 12},
    "passed over": {"num_negatives": 2, "range_min": 3, "range_max": 9, "relative_margin": None},
    "random": {"num_negatives": 4, "sampling": "random", "range_max": 40},
    "limits": {"absolute_margin": 0.1, "max_score": 0.6, "min_score": -0.2},
    "more than there are": {"num_negatives": 500, "range_max": 500, "relative_margin": None},
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("small", [False, True])
def test_shards_give_what_the_file_gives(steady, many_cases, tmp_path, monkeypatch, choice, small):
    if small:
        monkeypatch.setattr("anchor_embedding.embed.candidates.CosineScores", SmallBlocks)
        for room in ("pool", "candidates", "mining"):
            monkeypatch.setattr(f"anchor_embedding.embed.{room}.PART", 4)
    vectors = shards(steady, many_cases, tmp_path / "vectors")
    settings = MiningSettings(**CHOICES[choice])
    outcomes = {}
    for corpus in (many_cases / "documents.jsonl", vectors):
        steady.encoded = ()
        out = tmp_path / f"{corpus.name}.jsonl"
        mined = mine_negatives(many_cases / "pairs", out, steady, settings, corpus=corpus, **QUIET)
        outcomes[corpus] = outcome(mined)
        assert mined.card["corpus_texts"] == 103
        assert mined.card["corpus_vectors"] == ("float32" if corpus == vectors else None)
    assert outcomes[vectors] == outcomes[many_cases / "documents.jsonl"]
    negatives = {text for e in read_examples(out) for text in e.negatives}
    assert any("document" in text for text in negatives)
    if choice == "more than there are":
        assert {f"w5 untitled {i}" for i in range(3)} < negatives
    # only texts that are not in the corpus in that spelling were encoded
    kept = {row["text"] for row in Corpus(vectors).rows(range(103))}
    queries = {e.query for e in read_examples(many_cases / "pairs")}
    assert not kept & {*steady.encoded} - queries


def test_bm25_reads_the_texts_of_shards(steady, many_cases, tmp_path):
    """BM25 does not use the vectors, so they may come from any model with any instruction."""
    vectors = shards(steady, many_cases, tmp_path / "vectors", instruction="Find it.")
    settings = MiningSettings(relative_margin=None)
    outcomes = []
    for corpus in (many_cases / "documents.jsonl", vectors):
        out = tmp_path / f"{corpus.name}.jsonl"
        mined = mine_negatives(many_cases / "pairs", out, "bm25", settings, corpus, **QUIET)
        outcomes.append(outcome(mined))
    assert outcomes[0] == outcomes[1] and outcomes[0][1]["one"]["negatives"] > 100


@pytest.mark.parametrize("settings", [{"dtype": "float16"}, {"normalize": True}])
def test_rounded_shards_move_only_what_is_as_good(steady, many_cases, tmp_path, settings):
    """Half precision changes a cosine by less than 0.002, so a replaced negative has nearly the
    same score.
    """
    vectors = shards(steady, many_cases, tmp_path / "vectors", **settings)
    mined = [
        mine_negatives(many_cases / "pairs", tmp_path / f"{i}.jsonl", steady, corpus=c, **QUIET)
        for i, c in enumerate((many_cases / "documents.jsonl", vectors))
    ]
    scores = [
        [
            [float(unit(steady.encode([e.query]))[0] @ unit(steady.encode([text]))[0])
             for text in e.negatives]
            for e in read_examples(one.out)
        ]
        for one in mined
    ]  # fmt: skip
    assert [*map(len, scores[0])] == [*map(len, scores[1])]
    assert (
        max(abs(a - b) for x, y in zip(*scores, strict=True) for a, b in zip(x, y, strict=True))
        < 0.002
    )
    for name in ("positive_score", "negative_score"):
        first, second = (one.card["datasets"]["two"][name] for one in mined)
        assert first == pytest.approx(second, abs=0.002)


def without_shard(folder):
    next(iter(sorted(folder.glob("shard-*")))).unlink()


def cut_shard(folder):
    path = sorted(folder.glob("shard-*"))[3]
    path.write_bytes(path.read_bytes()[:-100])


def damaged_inside(folder):
    path = sorted(folder.glob("shard-*"))[2]
    data = bytearray(path.read_bytes())
    data[8:200] = bytes(192)
    path.write_bytes(data)


def no_manifest(folder):
    (folder / "corpus.json").unlink()


@pytest.mark.parametrize(
    ("settings", "damage", "words"),
    [
        ({}, without_shard, "shard 1 of 11 is missing; encode the corpus again with --resume"),
        ({}, cut_shard, "shard-00003.parquet: "),
        ({}, damaged_inside, "shard-00002.parquet: "),
        ({}, no_manifest, "is not a corpus of vectors: it has no corpus.json"),
        ({"columns": ()}, None, "has no column 'text'; encode the corpus into a new folder, with --columns text"),
        ({"columns": ("id_of",)}, None, "with --columns id_of,text"),
        ({"instruction": "Find it."}, None, "were encoded with the instruction 'Find it.', but those of one need no instruction"),
    ],
)  # fmt: skip
def test_shards_that_cannot_be_used(steady, many_cases, tmp_path, settings, damage, words):
    documents = tmp_path / "documents.jsonl"
    lines = (many_cases / "documents.jsonl").read_text().splitlines()
    write_rows(documents, [json.loads(line) | {"id_of": "x"} for line in lines])
    vectors = shards(steady, tmp_path, tmp_path / "vectors", **settings)
    if damage:
        damage(vectors)
    before = {*os.listdir(tmp_path)}
    with pytest.raises(InputError) as caught:
        mine_negatives(
            many_cases / "pairs", tmp_path / "out.jsonl", steady, corpus=vectors, **QUIET
        )
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert {*os.listdir(tmp_path)} == before


def test_shards_of_another_model_are_refused(base, steady, many_cases, tmp_path):
    vectors = shards(steady, many_cases, tmp_path / "vectors")
    other = tmp_path / "other"
    tiny_model("llama", seed=5).save_pretrained(other)
    tiny_tokenizer("smollm2").save_pretrained(other)
    shorter = Embedder.from_pretrained(base, max_length=20)
    plain = Embedder.from_pretrained(base, template="plain")
    own = CosineScores(steady.encode, steady.encode)
    cases = {
        "was encoded by another model or checkpoint": other,
        "was encoded with max_length 512, but this model reads with 20": shorter,
        "was encoded with template 'chat', but this model reads with 'plain'": plain,
        "CosineScores cannot be compared with its model": own,
    }
    for words, model in cases.items():
        with pytest.raises(InputError, match=re.escape(words)):
            mine_negatives(
                many_cases / "pairs", tmp_path / "x.jsonl", model, corpus=vectors, **QUIET
            )
    assert {*os.listdir(tmp_path)} == {"vectors", "other"}


def test_the_instruction_of_a_symmetric_dataset(steady, many_cases, tmp_path):
    """Its documents have an instruction. The corpus must have it too, and then a dataset without
    one is refused.
    """
    vectors = shards(steady, many_cases, tmp_path / "vectors", instruction="Find it.")
    pairs = many_cases / "pairs"
    both = Instructions("test", dict.fromkeys(("one", "two"), ("Find it.",)), {"one", "two"})
    given = {"corpus": vectors, **QUIET}
    mine_negatives(pairs, tmp_path / "both.jsonl", steady, instructions=both, **given)
    first = Instructions("test", both.table, frozenset({"one"}))
    with pytest.raises(InputError, match="those of two need no instruction"):
        mine_negatives(pairs, tmp_path / "x.jsonl", steady, instructions=first, **given)


def test_the_command_with_shards(pairs, base, tmp_path, capsys):
    """The unmodified model, whose vectors differ in their last digits from batch to batch."""
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    few = write_rows(tmp_path / "few.jsonl", rows[:25])
    documents = write_rows(
        tmp_path / "documents.jsonl", [{"text": row["positive"]} for row in rows[15:75]]
    )
    encode = ["encode", str(base), "--in", str(documents), "--out", str(tmp_path / "vectors")]
    assert main([*encode, "--shard-size", "17", "--dtype", "float32"]) == 0
    mine = [
        "mine",
        "--data",
        str(few),
        "--model",
        str(base),
        "--dtype",
        "float32",
        "--relative-margin",
        "0",
    ]
    for corpus, out in (("documents.jsonl", "a.jsonl"), ("vectors", "b.jsonl")):
        words = ["--corpus", str(tmp_path / corpus), "--out", str(tmp_path / out)]
        assert main([*mine, *words]) == 0
    outcomes = [read_examples(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    assert outcomes[0] == [replace(e, dataset=outcomes[0][0].dataset) for e in outcomes[1]]
    assert sum(len(e.negatives) for e in outcomes[0]) > 20
    capsys.readouterr()
    assert main([*mine, "--corpus", str(tmp_path), "--out", str(tmp_path / "c.jsonl")]) == 2
    assert "is not a corpus of vectors: it has no corpus.json" in capsys.readouterr().err


# ---- interrupted and resumed

# Forks a process for each task; it dies at one of its file operations if the task says so.
STARTS = """
import json, os, shutil, signal, sys
from anchor_embedding.cli.main import main
from anchor_embedding.embed import candidates, mining, pool

class SmallBlocks(candidates.CosineScores):
    def __init__(self, encode_query, encode_document, device):
        super().__init__(encode_query, encode_document, device, queries=9, documents=11)

def count(function):
    def counted(*arguments, **settings):
        global operations
        operations += "mined" in str(arguments[0]) or "dir_fd" in settings
        if operations and operations == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **settings)
    return counted

def logged(replicas, texts, instruction):
    with open(log, "a") as file:
        file.write(json.dumps(texts) + "\\n")
    return encode_on(replicas, texts, instruction)

candidates.CosineScores = SmallBlocks
for room in (candidates, mining, pool):
    room.PART = 8
encode_on, candidates.encode_on = candidates.encode_on, logged
os.replace = count(os.replace)
os.unlink = count(os.unlink)
shutil.rmtree = count(shutil.rmtree)
operations = 0
for line in sys.stdin:
    last, log, arguments = json.loads(line)
    child = os.fork()
    if not child:
        code = main(arguments)
        with open(log + ".operations", "w") as file:
            file.write(str(operations))
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def mine_in_process():
    """A process that has imported everything; called with arguments, it returns the exit code."""
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def call(log, arguments, last=0):
        process.stdin.write(json.dumps([last, str(log), [*map(str, arguments)]]) + "\n")
        process.stdin.flush()
        lines = iter(process.stdout.readline, "")
        return next(int(line) for line in lines if line.strip().lstrip("-").isdigit())

    yield call
    process.stdin.close()
    process.wait(timeout=120)


def logged_calls(log):
    return log.read_text().splitlines() if log.exists() else []


@pytest.fixture(scope="module")
def stopped(mine_in_process, base, many_cases, tmp_path_factory):
    """Mining that dies at its n-th file operation and is resumed must give the result of an
    uninterrupted run.
    """
    home = tmp_path_factory.mktemp("stopped")
    encode = ["encode", base, "--in", many_cases / "documents.jsonl", "--out", home / "vectors"]
    assert main([*map(str, encode), "--shard-size", "30"]) == 0

    def command(corpus, out, *more):
        given = ["--corpus", corpus, "--model", base, "--relative-margin", "none", *more]
        return ["mine", "--data", many_cases / "pairs", "--out", out, *given]

    def whole(corpus):
        folder = home / f"{corpus.name}-whole"
        out = folder / "mined.jsonl"
        if not folder.exists():
            assert mine_in_process(home / "log", command(corpus, out)) == 0
        return out, int((home / "log.operations").read_text())

    def stop(corpus, last, tmp_path):
        expected, operations = whole(corpus)
        last = last % operations + 1
        out = tmp_path / "mined.jsonl"
        first, second = (tmp_path / "first.log", tmp_path / "second.log")
        assert mine_in_process(first, command(corpus, out), last) == -signal.SIGKILL
        if out.exists():  # only the removal of the folder was left to do
            assert mine_in_process(second, command(corpus, out, "--resume")) == 2
        else:
            assert mine_in_process(second, command(corpus, out, "--resume")) == 0
        assert out.read_bytes() == expected.read_bytes()
        cards = [
            json.loads(path.with_name("mined.jsonl.card.json").read_text())
            for path in (out, expected)
        ]
        assert cards[0] == cards[1]
        # only what the last call before the end had encoded may be lost
        assert not {*logged_calls(first)[:-1]} & {*logged_calls(second)}
        # started once more, it gives the same result, and none of these files is left
        assert mine_in_process(second, command(corpus, out, "--resume", "--force")) == 0
        assert out.read_bytes() == expected.read_bytes()
        assert not out.with_name(".mined.jsonl.mining").exists()
        return operations

    stop.corpora = (home / "vectors", many_cases / "documents.jsonl")
    return stop


@pytest.mark.thorough
@pytest.mark.parametrize("last", [3, 6, 9, 14, -8, -4, -3, -2, -1])
def test_killed_mining_goes_on(stopped, tmp_path, last):
    stopped(stopped.corpora[0], last, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "step"), [(0, 1), (1, 5)])
def test_killed_at_every_file_operation(stopped, tmp_path, number, step):
    corpus = stopped.corpora[number]
    last = 0
    while last < stopped(corpus, last, tmp_path / str(last)):
        last += step
    print(f"{corpus.name}: killed at {last // step} file operations")
    assert last > 50


class Interrupts(Steady):
    calls = 0

    def encode(self, texts, *arguments, **settings):
        self.calls += not isinstance(texts, str)
        if self.calls == 3:
            raise KeyboardInterrupt
        return super().encode(texts, *arguments, **settings)


def test_what_was_finished_is_not_mixed(steady, many_cases, tmp_path):
    """The folder is left alone unless it is resumed, and only the same run can resume it."""
    out = tmp_path / "mined.jsonl"
    pairs = many_cases / "pairs"
    said = []
    given = {"progress": False, "say": said.append}
    with pytest.raises(KeyboardInterrupt):
        mine_negatives(pairs, out, Interrupts(steady.decoder, steady.tokenizer), **given)
    work = tmp_path / ".mined.jsonl.mining"
    assert said[-1] == f"note: the finished work is in {work}; go on with --resume"
    kept = {path: path.read_bytes() for path in work.rglob("*.*")}
    assert len(kept) > 1
    corpus = many_cases / "documents.jsonl"
    refused = {
        "holds the finished work of a run": {},
        "num_negatives was 5 and is now 4": {"settings": MiningSettings(num_negatives=4)},
        "corpus was": {"corpus": corpus},
        "instructions was": {"instructions": Instructions("test", {"one": ("Find it.",)})},
        "dtype was 'auto' and is now 'float32'": {"dtype": "float32"},
        "model was 'model' and is now 'bm25'": {"model": "bm25"},
        "pairs was": {"source": pairs / "one.jsonl"},
    }
    for words, changed in refused.items():
        call = {"source": pairs, "out": out, "model": steady, "resume": bool(changed)} | changed
        with pytest.raises(InputError, match=re.escape(words)):
            mine_negatives(**call, **QUIET)
    assert {path: path.read_bytes() for path in work.rglob("*.*")} == kept
    mined = mine_negatives(pairs, out, steady, resume=True, **QUIET)
    whole = mine_negatives(pairs, tmp_path / "whole.jsonl", steady, resume=True, **QUIET)
    assert outcome(mined) == outcome(whole)
    assert not work.exists()


def test_two_processes_do_not_mine_into_one_file(pairs, tmp_path):
    work = tmp_path / ".mined.jsonl.mining"
    work.mkdir()
    (work / "run.json").write_text("{}")
    with (
        FileLock(work / ".lock"),
        pytest.raises(InputError, match="another process mines into the same file now"),
    ):
        mine_negatives(pairs, tmp_path / "mined.jsonl", **QUIET)
    assert (work / "run.json").read_text() == "{}"
    mine_negatives(pairs, tmp_path / "mined.jsonl", **QUIET)
    assert sorted(os.listdir(tmp_path)) == ["mined.jsonl", "mined.jsonl.card.json"]


def test_a_folder_is_not_replaced(pairs, tmp_path, capsys):
    (tmp_path / "mined.jsonl").mkdir()
    assert (
        main(["mine", "--data", str(pairs), "--out", str(tmp_path / "mined.jsonl"), "--force"]) == 2
    )
    assert "mined.jsonl is a folder; name a file" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["mined.jsonl"]


# no file may exceed 5 kB; the vectors have 7 kB
FULL = """
import resource, sys
import numpy as np
from anchor_embedding.common.errors import InputError
from anchor_embedding.embed import candidates, mining, pool
def encode_query(texts):
    return np.ones((len(texts), 8), np.float32)
def encode(texts):
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, resource.RLIM_INFINITY))
    return np.ones((len(texts), 8), np.float32)
pairs, out, part = sys.argv[1:]
for room in (candidates, mining, pool):
    room.PART = int(part)
try:
    mining.mine_negatives(pairs, out, candidates.CosineScores(encode_query, encode), progress=False)
except InputError as error:
    print(error)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("part", "kept"), [(4096, 0), (50, 1)])
def test_a_full_disk_is_one_line(pairs, tmp_path, part, kept):
    """The disk is full while writing one file, or the file of all vectors; then the parts stay."""
    process = run_python(FULL, pairs, tmp_path / "mined.jsonl", part)
    out, error = process.communicate(timeout=280)
    lines = out.splitlines()
    assert process.returncode == 0 and len(lines) == 1 + kept, error
    assert "cannot write" in lines[-1] and "free space" in lines[-1].lower()
    assert os.listdir(tmp_path) == [".mined.jsonl.mining"] * kept


FEW_OR_MANY = """
import json, re, sys, threading, time
from pathlib import Path
import numpy as np
from anchor_embedding.embed import candidates, mining, pool
from anchor_embedding.embed.corpus import CorpusSettings, encode_corpus
from anchor_embedding.embed.embedder import Embedder

class Quick(Embedder):
    def encode(self, texts, instruction=None, *_, normalize=False, **__):
        if isinstance(texts, str):
            return np.ones(self.dimension, np.float32) / self.dimension**0.5
        random = np.random.default_rng(len(texts))
        return random.normal(size=(len(texts), self.dimension)).astype(np.float32)

class SmallBlocks(candidates.CosineScores):
    def __init__(self, encode_query, encode_document, device):
        super().__init__(encode_query, encode_document, device, queries=256, documents=512)

def watch():
    global most
    while True:
        status = open("/proc/self/status").read()
        most = max(most, int(re.search(r"RssAnon:\\s*(\\d+) kB", status)[1]))
        time.sleep(0.002)

most = 0
candidates.CosineScores = SmallBlocks
threading.Thread(target=watch, daemon=True).start()
how, base, pairs, *sources = sys.argv[1:]
model = Embedder.from_pretrained(base, dtype="float32")
model = Quick(model.decoder, model.tokenizer)
outcomes = []
for path in map(Path, sources):
    shards = path.with_suffix("")
    if how == "encode":
        encode_corpus(model, path, shards, CorpusSettings(shard_size=5_000), progress=False)
    else:
        corpus = shards if how == "shards" else path
        out = path.with_name(f"{how}-{shards.name}.jsonl")
        mining.mine_negatives(pairs, out, model, corpus=corpus, progress=False)
    outcomes.append(most / 1024)
print(json.dumps(outcomes))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="the memory of a process is read from /proc"
)
def test_memory_does_not_hold_encoded_documents(base, tmp_path):
    """180,000 more documents, with 81 MB of texts and 23 MB of vectors, need at most 200 bytes
    each; a file of texts would need more than twice as much.
    """
    pairs = write_many(tmp_path / "pairs.jsonl", 600, 5)
    sources = [tmp_path / f"{size}.txt" for size in (20_000, 200_000)]
    for path in sources:
        lines = (f"document {i} {'word ' * 80}\n" for i in range(int(path.stem)))
        path.write_text("".join(lines))
    more = {}
    for how in ("encode", "shards", "texts"):
        process = run_python(FEW_OR_MANY, how, base, pairs, *sources)
        out, error = process.communicate(timeout=280)
        assert process.returncode == 0, error
        few, many = json.loads(out.splitlines()[-1])
        more[how] = many - few
    print({how: round(megabytes) for how, megabytes in more.items()})
    assert 0 < more["shards"] < 36 < 72 < more["texts"]


def test_settings_that_a_scorer_does_not_have_are_refused(pairs, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    tiny_model("llama").save_pretrained(tmp_path / "base")
    tiny_tokenizer("smollm2").save_pretrained(tmp_path / "base")
    words = Transformer(str(tmp_path / "base"))
    pooling = Pooling(words.get_embedding_dimension(), "lasttoken")
    other = tmp_path / "other"
    SentenceTransformer(modules=[words, pooling], device="cpu").save(str(other))
    told = Instructions({}, {"numpy": ("Find the code.",)})
    out = tmp_path / "mined.jsonl"
    for model, settings, message in (
        ("bm25", {"instructions": told}, "also those of an instruction; leave out"),
        ("bm25", {"max_length": 32}, "leave out max_length = 32"),
        ("bm25", {"dtype": "bfloat16"}, "leave out dtype and device"),
        ("bm25", {"device": "cuda:7"}, "leave out dtype and device"),
        (other, {"instructions": told}, "its own prompts; leave out the instructions"),
        (other, {"max_length": 32}, "leave out max_length = 32"),
        (other, {"dtype": "float32"}, "leave out dtype = float32"),
    ):
        with pytest.raises(InputError, match=message):
            mine_negatives(pairs, out, model, **settings, **QUIET)
    assert not out.exists()


def test_mining_says_what_it_does_not_use(base, tmp_path):
    """The instructions of a model's training, and the negatives that the rows have."""
    rows = [
        {"query": f"query {n}", "positive": f"text {n}", "negatives": [f"wrong {n}"] * (n < 2)}
        for n in range(8)
    ]
    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    embedder = Embedder.from_pretrained(base, device="cpu")
    embedder.instructions = {"table": {"pairs": ["Find"]}, "symmetric": []}
    embedder.save_pretrained(tmp_path / "told")
    told = Instructions("own", {"pairs": ("Find",)})
    for name, model, instructions, noted in (
        ("memory", embedder, None, True),
        ("folder", tmp_path / "told", None, True),
        ("given", embedder, told, False),
        ("bare", base, None, False),
        ("bm25", "bm25", None, False),
    ):
        lines = []
        out = tmp_path / f"{name}.jsonl"
        settings = {"instructions": instructions, "progress": False, "say": lines.append}
        mine_negatives(source, out, model, **settings)
        assert any("trained with instructions" in line for line in lines) == noted, name
        assert any("2 pairs of 8 have negatives already" in line for line in lines)
