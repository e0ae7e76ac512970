"""`anchor mine` from end to end: what is mined reaches the loss, models of every kind mine, memory
stays flat, nothing half-written is left.
"""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from anchor_embedding.cli import main
from anchor_embedding.data.batches import Instructions, tokenize_batch
from anchor_embedding.data.docstrings import docstring_pairs
from anchor_embedding.data.sources import read_examples
from anchor_embedding.embed.embedder import Embedder
from anchor_embedding.embed.export import export_embedder
from anchor_embedding.embed.mining import MiningSettings, mine_negatives
from anchor_embedding.evaluate.retrieval import HeldoutRetrieval
from anchor_embedding.train.recipe_files import load_recipe
from anchor_embedding.train.stage import train

QUIET = {"progress": False, "say": lambda text: None}


@pytest.fixture(scope="module")
def docstrings():
    """Pairs of numpy and, held out, of tqdm."""
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
    """The same with negatives by BM25, through the command."""
    out = pairs.parent / "mined" / "numpy.jsonl"
    assert main(["mine", str(pairs), "--out", str(out), "--num-negatives", "4"]) == 0
    return out


def small(data, base, *more):
    """The Stage II recipe, small."""
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
    """The terms of `anchor train --dry-run`."""
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
    # again, over the first result
    again = ["mine", str(pairs), "--out", str(mined), "--num-negatives", "4", "--json"]
    assert main(again) == 2
    assert f"{mined} is there already; name another file, or replace" in capsys.readouterr().err
    assert main([*again, "--force"]) == 0
    assert json.loads(capsys.readouterr().out) == card


def test_mined_negatives_reach_infonce(pairs, mined, base, capsys):
    """The same 16 pairs: as many texts more as there are negatives, each of them a rival of every
    query, and another loss.
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
    # every rival adds to the sum below the fraction
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


def test_training_on_mined_pairs_learns_as_well(pairs, mined, base, docstrings, tmp_path):
    """Twenty steps of a tiny model: with and without the negatives it must fit its pairs better
    than before; no more is claimed.
    """
    train_pairs = read_examples(pairs)[:120]
    judge = HeldoutRetrieval([e.query for e in train_pairs], [e.positive for e in train_pairs])
    untrained = judge(Embedder.from_pretrained(base, max_length=48).encode)["mrr"]
    for data, hard in ((pairs, 0), (mined, 2)):
        run = tmp_path / f"run{hard}"
        train(small(data, base, f"hard_negatives={hard}", "steps=20"), run, **QUIET)
        assert judge(Embedder.from_pretrained(run / "final").encode)["mrr"] > 1.2 * untrained
        card = json.loads((run / "card.json").read_text())
    assert (
        card["fingerprint"]
        == json.loads((mined.parent / "numpy.jsonl.card.json").read_text())["fingerprint"]
    )


def test_every_kind_of_model_mines(pairs, base, tmp_path):
    """A run, its result and an exported model, also as sentence-transformers alone reads it: the
    same negatives from the same weights.
    """
    run = tmp_path / "run"
    train(small(pairs, base, "hard_negatives=0", "steps=2"), run, **QUIET)
    embedder = Embedder.from_pretrained(run / "final", dtype="float32")
    prompt = "Find the documentation of what is asked"  # which the exported model has by itself
    exported = export_embedder(
        embedder, tmp_path / "exported", instructions={"query": prompt}, base="some/base"
    )
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for path in exported.iterdir():
        if path.name not in ("anchor_embedding.json", "bare_tokenizer"):
            (foreign / path.name).symlink_to(path)
    told = {"instructions": Instructions("test", {"numpy": (prompt,)})}
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
            dtype="float32",
            **({} if name == "foreign" else told),
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
    told = tmp_path / "told.csv"
    told.write_text("dataset,instruction,symmetric\nnumpy,Find the documentation,0\n")
    assert (
        main(
            [
                "mine",
                str(pairs),
                "--out",
                str(tmp_path / "x.jsonl"),
                "--model",
                str(exported),
                "--instructions",
                str(told),
            ]
        )
        == 2
    )
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("x", ".x"))]
    assert (
        main(
            [
                "mine",
                str(pairs),
                "--out",
                str(tmp_path / "y.jsonl"),
                "--model",
                str(base),
                "--instructions",
                str(told),
            ]
        )
        == 0
    )
    assert json.loads((tmp_path / "y.jsonl.card.json").read_text())["instructions"] == str(told)


def test_datasets_stay_apart(tmp_path):
    """Documents of one dataset are no negatives in another, and rows keep their dataset."""
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
from anchor_embedding.embed.mining import CosineScores, MiningSettings, mine_negatives
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


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="the memory of a process is read from /proc"
)
def test_memory_does_not_hold_the_corpus(tmp_path):
    """Three times as many pairs, with 30 MB more of texts and 37 MB more of document vectors: less
    than a third of that more.
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
from anchor_embedding.embed.mining import CosineScores, mine_negatives
def encode(texts):
    print("encoding", flush=True)
    time.sleep(60)
scorer = CosineScores(encode, encode)
mine_negatives(sys.argv[1], sys.argv[2], scorer, force=True, progress=False)
"""


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_search_leaves_the_earlier_result(pairs, tmp_path, stop):
    out = tmp_path / "mined.jsonl"
    out.write_text("earlier\n")
    process = run_python(SLOW, pairs, out)
    assert process.stdout.readline().strip() == "encoding"
    os.kill(process.pid, stop)
    process.communicate(timeout=60)
    assert process.returncode != 0 and out.read_text() == "earlier\n"
    left = {path.name for path in tmp_path.iterdir()} - {"mined.jsonl"}
    assert not left if stop == signal.SIGINT else all(name.startswith(".mined.") for name in left)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-negatives", "0"], "num_negatives must be at least 1"),
        (["--range-min", "98"], "leave no room for 5 negatives"),
        (["--relative-margin", "-1"], "relative_margin is -1.0; give a number of 0 or more"),
        (["--relative-margin", "nan"], "relative_margin is nan; give a number of 0 or more"),
        (["--model", "no-such-folder/model"], "no-such-folder/model"),
        (["--instructions", "none.txt"], "instructions are read from .csv or .toml"),
        (["--corpus", "no-such-file.txt"], "no-such-file.txt: cannot be read"),
        (["--corpus", os.devnull], "there is no text in it"),
        (["--corpus", "documents.csv"], "a text a line, not from .csv"),
        (["--corpus", "mined.jsonl"], "the corpus would be replaced"),
        (["--out", "pairs.tsv"], "written as .jsonl or .jsonl.gz"),
    ],
)
def test_bad_input_is_one_line(pairs, tmp_path, capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert main(["mine", str(pairs), "--out", "mined.jsonl", *arguments]) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("anchor: ")]
    assert len(lines) == 1 and words in lines[0] and not printed.out
    assert not list(tmp_path.iterdir())


def test_an_empty_name_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in (["mine", "", "--out", "mined.jsonl"], ["data", "check", ""]):
        assert main(arguments) == 2
        assert "anchor: no data are named; give the path of your data" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_bad_rows_stop_or_are_left_out(tmp_path, capsys):
    path = tmp_path / "pairs.csv"
    path.write_text(
        "question,answer\nhow to sort a list,Call sort on the list.\nhow to open,\nto "
        "get a sorted list,Call sorted on the list.\n"
    )
    assert main(["mine", str(path), "--out", str(tmp_path / "mined.jsonl")]) == 2
    assert "pairs.csv:3: 'answer' is empty" in capsys.readouterr().err
    assert (
        main(["mine", str(path), "--out", str(tmp_path / "mined.jsonl"), "--on-bad-row", "skip"])
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
        main(["mine", str(pairs), "--out", str(tmp_path / "x.jsonl"), "--relative-margin", "some"])
    assert "'some' is neither a number nor none" in capsys.readouterr().err


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit):
        main(["mine", "--help"])
    text = capsys.readouterr().out
    assert all(
        "--" + name.replace("_", "-") in text for name in MiningSettings.__dataclass_fields__
    )


def test_a_corpus_has_its_titles_as_the_positives_have(tmp_path):
    """Without its title a positive would come back as the hardest negative of its own query."""
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
        main(["mine", str(pairs), "--out", str(tmp_path / "none.jsonl"), "--max-score", "-1"]) == 0
    )
    told = capsys.readouterr().err
    assert "no negative was found for any query" in told and "train with" not in told


def test_interrupted_says_that_nothing_was_written(pairs, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("anchor_embedding.embed.mining.read_pool", interrupted)
    assert main(["mine", str(pairs), "--out", str(tmp_path / "none.jsonl")]) == 130
    assert "interrupted; nothing was written" in capsys.readouterr().err and not [
        *tmp_path.iterdir()
    ]
