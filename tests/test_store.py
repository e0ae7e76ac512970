"""Stores of examples: many processes, killed passes, changing files, every format, and the size of
the paper's mixture.
"""

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anchor_embedding.common.errors import InputError
from anchor_embedding.data.batches import BatchPlan, Instructions
from anchor_embedding.data.check import check_data
from anchor_embedding.data.examples import fingerprint
from anchor_embedding.data.sources import read_examples
from anchor_embedding.data.store import open_examples

OLD_NAMES = """allnli_split1 allnli_split2 dureader eli5_question_answer fever hotpot_qa miracl mrtydi msmarco_passage msmarco_document nq
    quora_duplicates_split1 quora_duplicates_split2 squad t2ranking trivia_qa""".split()
NEW_NAMES = sorted({name.removesuffix("_split1").removesuffix("_split2") for name in OLD_NAMES})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder for one test."""
    monkeypatch.setenv("ANCHOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "stores"


def rows(count, seed=0, negatives="negative"):
    chance = random.Random(seed)
    words = [
        "anchor",
        "ship",
        "rope",
        "Öl",
        "船",
        "😀",
        "line\u2028end",
        'a "quote"',
        "comma, here",
    ]
    for _ in range(count):
        query, positive, *more = (
            " ".join(chance.choices(words, k=chance.randint(1, 12))) for _ in range(4)
        )
        yield {
            "query": query,
            "positive": positive,
            negatives: more if negatives == "negatives" else more[0],
        }


def write_rows(path, found):
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        gzip.open(path, "wt", encoding="utf-8")
        if path.suffix == ".gz"
        else open(path, "w", encoding="utf-8") as file
    ):
        file.writelines(json.dumps(row) + "\n" for row in found)
    return path


def stores(cache):
    """The files in the cache, except locks."""
    return (
        sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")
        if cache.exists()
        else []
    )


def start(code, *arguments):
    """A Python process that runs `code`."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, timeout=120):
    out, errors = process.communicate(timeout=timeout)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


# ---- formats


def make_jsonl(folder):
    write_rows(folder / "nq.jsonl", rows(300, 1))
    write_rows(folder / "squad.jsonl.gz", rows(200, 2, "negatives"))
    write_rows(
        folder / "mixed.jsonl",
        ({**row, "dataset": f"d{i % 3}"} for i, row in enumerate(rows(100, 3))),
    )


def make_csv(folder):
    import csv

    folder.mkdir(parents=True)
    with open(folder / "pairs.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["query", "positive", "negative"])
        writer.writeheader()
        writer.writerows(
            {**row, "positive": row["positive"] + "\nsecond line"} for row in rows(200, 4)
        )


def make_parquet(folder):
    folder.mkdir(parents=True)
    pq.write_table(
        pa.Table.from_pylist(list(rows(2500, 5, "negatives"))),
        folder / "tables.parquet",
        row_group_size=700,
    )


def make_tevatron(folder):
    def passages(texts):
        return [{"docid": str(len(text)), "title": "T", "text": text} for text in texts]

    found = [(row["query"], passages(row["negatives"])) for row in rows(100, 6, "negatives")]
    names = ("query", "positive_passages", "negative_passages")
    write_rows(
        folder / "tevatron.jsonl",
        (dict(zip(names, [query, texts[:2], texts[1:]], strict=True)) for query, texts in found),
    )


def make_beir(folder):
    found = list(rows(100, 7))
    write_rows(
        folder / "corpus.jsonl.gz",
        (
            {"_id": f"d{i}", "title": f"T{i}", "text": row["positive"]}
            for i, row in enumerate(found)
        ),
    )
    write_rows(
        folder / "queries.jsonl",
        ({"_id": f"q{i}", "text": row["query"]} for i, row in enumerate(found)),
    )
    lines = [f"q{i % 40}\td{i}\t{i % 3}\n" for i in range(100)]
    (folder / "qrels").mkdir()
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))


def make_saved(folder):
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(list(rows(500, 8))).rename_column("query", "anchor").save_to_disk(
        folder, num_shards=3
    )


@pytest.mark.parametrize(
    "make",
    [make_jsonl, make_csv, make_parquet, make_tevatron, make_beir, make_saved],
    ids=lambda make: make.__name__,
)
def test_a_store_equals_the_list(tmp_path, make):
    make(tmp_path / "source")
    listed = read_examples(tmp_path / "source")
    for _ in range(2):  # created, then mapped
        store = open_examples(tmp_path / "source")
        assert list(store) == listed and len(listed) > 50
        assert store.fingerprint == fingerprint(listed)
        assert store.lengths.tolist() == [
            len(e.query) + len(e.positive) + sum(map(len, e.negatives)) for e in listed
        ]
        names = [example.dataset for example in listed]
        assert store.sizes == {name: names.count(name) for name in dict.fromkeys(names)}
        sample = random.Random(0).sample(range(len(listed)), 40)
        assert store.take(sample) == [listed[i] for i in sample]


def test_beir_rows_are_those_of_the_judgements(tmp_path):
    make_beir(tmp_path / "beir")
    found = list(rows(100, 7))

    def text(i):
        return f"T{i} {found[i]['positive']}".strip()

    wanted = set()
    for i in range(100):
        if i % 3:
            same_query = [j for j in range(100) if j % 40 == i % 40]
            wanted.add(
                (found[i % 40]["query"], text(i), tuple(text(j) for j in same_query if j % 3 == 0))
            )
    assert {(e.query, e.positive, e.negatives) for e in open_examples(tmp_path / "beir")} == wanted


def test_a_plan_from_a_store_is_that_of_the_names(tmp_path):
    make_jsonl(tmp_path / "source")
    store = open_examples(tmp_path / "source")
    one = BatchPlan(store.rows, 16, 3)
    other = BatchPlan([example.dataset for example in store], 16, 3)
    assert [one.step(k) for k in range(80)] == [other.step(k) for k in range(80)]
    for k in range(20):
        assert {store.dataset_of(i) for i in one.step(k)} == {one.dataset(k)}


# ---- the Echo names


def test_echo_names_old_and_new_all_have_instructions(tmp_path):
    paper = Instructions.paper()
    released = Instructions.as_released()
    for names in (OLD_NAMES, NEW_NAMES):
        for name in names:
            write_rows(tmp_path / f"echo{len(names)}" / f"{name}.jsonl", rows(4, len(name)))
        store = open_examples(tmp_path / f"echo{len(names)}")
        assert list(store.sizes) == sorted(names)
        for row in range(len(store)):
            query, positive = paper.for_example(store.dataset_of(row), row)
            symmetric = store.dataset_of(row).startswith(("allnli", "quora_duplicates"))
            assert query and positive == (query if symmetric else None)
            assert released.for_example(store.dataset_of(row), row) == (query, None)
    for whole in ("allnli", "quora_duplicates"):
        first, second = paper.table[whole]
        assert {paper.for_example(f"{whole}_split1", row) for row in range(4)} == {(first, first)}
        assert {paper.for_example(f"{whole}_split2", row) for row in range(4)} == {(second, second)}
        assert [paper.for_example(whole, row)[0] for row in range(4)] == [first, second] * 2


# ---- many processes, killed passes, changing files

OPEN = """
import json, sys
from anchor_embedding.data import store
made, make = [], store._make_store
store._make_store = lambda *args: (made.append(1), make(*args))
said = []
found = store.open_examples(sys.argv[1], say=said.append)
print(json.dumps([len(made), found.fingerprint, len(found), found[len(found) // 2].query, said]))
"""


@pytest.mark.thorough
def test_four_processes_read_a_new_source_once(tmp_path, cache):
    write_rows(tmp_path / "source" / "nq.jsonl", rows(20_000))
    processes = [start(OPEN, tmp_path / "source") for _ in range(4)]
    found = [finish(process) for process in processes]
    assert sum(made for made, *_ in found) == 1
    assert len({tuple(result[1:4]) for result in found}) == 1 and found[0][2] == 20_000
    assert found[0][1] == fingerprint(read_examples(tmp_path / "source"))
    assert len(stores(cache)) == 1


@pytest.mark.thorough
def test_a_killed_pass_leaves_nothing_that_is_trusted(tmp_path, cache):
    write_rows(tmp_path / "source" / "nq.jsonl", rows(30_000))
    killed = 0
    for _ in range(5):
        process = start(OPEN, tmp_path / "source")
        while process.poll() is None and not any(
            path.stat().st_size for path in cache.glob(".*/rows.arrow")
        ):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        # it was finished before the signal came
        if any(not name.startswith(".") for name in stores(cache)):
            shutil.rmtree(cache)
        else:
            killed += process.returncode == -signal.SIGKILL
        if killed == 2:
            break
    assert (
        killed == 2 and len(stores(cache)) == 1
    )  # the second process removed what the first had left
    store = open_examples(tmp_path / "source")
    assert store.fingerprint == fingerprint(read_examples(tmp_path / "source"))
    assert stores(cache) == [store.folder.name]


def test_a_changed_source_is_read_anew(tmp_path, cache):
    path = write_rows(tmp_path / "source" / "nq.jsonl", rows(50))
    old = open_examples(tmp_path / "source")
    first = old[0]
    write_rows(path, rows(60, 1))
    new = open_examples(tmp_path / "source")
    assert (len(new), list(new)) == (60, read_examples(tmp_path / "source"))
    assert (len(old), old[0]) == (50, first)  # a process that has the old one open keeps using it
    write_rows(tmp_path / "source" / "squad.jsonl", rows(10))
    assert list(open_examples(tmp_path / "source")) == read_examples(tmp_path / "source")
    assert len(stores(cache)) == 1
    text = path.read_bytes()
    path.write_bytes(text.replace(b"anchor", b"ANCHOR"))  # the same size, in the same second
    assert list(open_examples(tmp_path / "source")) == read_examples(tmp_path / "source")


def test_a_file_that_changes_or_vanishes_meanwhile_is_an_error(tmp_path, cache, monkeypatch):
    path = write_rows(tmp_path / "source" / "nq.jsonl", rows(50))
    from anchor_embedding.data import store

    write = store._write_store

    def changed(*arguments):
        found = write(*arguments)
        write_rows(path, rows(60, 1))
        return found

    monkeypatch.setattr(store, "_write_store", changed)
    with pytest.raises(InputError, match="changed while it was read"):
        open_examples(tmp_path / "source")

    def vanished(*arguments):
        path.unlink()
        return write(*arguments)

    monkeypatch.setattr(store, "_write_store", vanished)
    with pytest.raises(
        InputError, match=r"nq\.jsonl: cannot be read \(No such file or directory\)"
    ):
        open_examples(tmp_path / "source")
    assert stores(cache) == []


def test_a_vanished_source_is_one_clear_error(tmp_path):
    path = write_rows(tmp_path / "nq.jsonl", rows(5))
    store = open_examples(path)
    path.unlink()
    with pytest.raises(InputError, match=r"nq\.jsonl: there is no such file or folder"):
        open_examples(path)
    assert len(list(store)) == 5


def test_a_full_disk_is_one_clear_error(tmp_path, cache):
    write_rows(tmp_path / "nq.jsonl", rows(20_000))
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))\n"
    )
    process = start(code + OPEN, tmp_path / "nq.jsonl")
    _, errors = process.communicate(timeout=120)
    assert (
        process.returncode != 0 and "InputError: cannot write" in errors and "Free space" in errors
    )
    assert stores(cache) == []


def test_check_goes_on_after_a_broken_file(tmp_path):
    write_rows(tmp_path / "source" / "nq.jsonl.gz", rows(50))
    path = tmp_path / "source" / "aaa.jsonl.gz"
    path.write_bytes((tmp_path / "source" / "nq.jsonl.gz").read_bytes()[:300])
    bad = "{\n" * 30
    (tmp_path / "source" / "bad.jsonl").write_text(
        bad + json.dumps({"query": "q", "positive": "p"}) + "\n"
    )
    check = check_data(tmp_path / "source")
    assert check.datasets["nq"]["rows"] == 50 and check.bad_rows == 31 and len(check.bad) == 20
    assert (
        "aaa.jsonl.gz: the gzip file is broken" in check.bad[0]
        and "bad.jsonl:19: broken JSON" in check.bad[19]
    )
    assert "50" in str(check) and "31 bad rows" in str(check)


# ---- the size of the paper's mixture

MEASURE = """
import json, resource, sys, time
import numpy as np
from anchor_embedding.data.batches import BatchPlan
from anchor_embedding.data.store import open_examples
start = time.perf_counter()
store = open_examples(sys.argv[1], progress=False, say=lambda text: None)
opened = time.perf_counter() - start
peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]
start = time.perf_counter()
plan = BatchPlan(store.rows, 512)
steps = [plan.step(k) for k in range(0, 200)]
planned = time.perf_counter() - start
start = time.perf_counter()
texts = sum(len(example.query) for step in steps for example in store.take(step))
taken = time.perf_counter() - start
lengths = int(store.lengths.sum())
if sys.argv[2] == "all":
    for example in store:
        texts += len(example.positive)
peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
print(json.dumps({"rows": len(store), "opened": opened, "planned": planned, "taken": taken, "gigabytes": peaks, "characters": lengths,
                  "fingerprint": store.fingerprint, "datasets": len(store.sizes)}))
"""


@pytest.mark.slow
def test_one_and_a_half_million_rows_in_less_than_a_gigabyte(tmp_path, capsys):
    chance = random.Random(0)
    words = [f"word{i}" for i in range(1000)]
    text = [" ".join(chance.choices(words, k=n)) for n in (6, 8, 10, 30, 60) for _ in range(200)]
    (tmp_path / "echo").mkdir()
    for name in NEW_NAMES:
        with open(tmp_path / "echo" / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for i in range(1_500_000 // len(NEW_NAMES) + 1):
                query, positive, negative = chance.choices(text, k=3)
                file.write(
                    f'{{"query": "{name} {i} {query[:40]}", "positive": "{positive}", '
                    f'"negative": "{negative}"}}\n'
                )
    size = sum(path.stat().st_size for path in (tmp_path / "echo").iterdir())
    first, second = (
        finish(start(MEASURE, tmp_path / "echo", part), 1800) for part in ("some", "all")
    )
    with capsys.disabled():
        print(f"\n{size / 1e9:.2f} GB; first {first}; second {second}")
    assert first["rows"] == second["rows"] >= 1_500_000 and first["datasets"] == 14
    assert first["fingerprint"] == second["fingerprint"]
    assert max(first["gigabytes"] + second["gigabytes"]) < 1
    assert second["opened"] < 5 and second["planned"] < 5 and second["taken"] < 30


# ---- real text


@pytest.mark.thorough
@pytest.mark.skipif(
    "ANCHOR_DATA" not in os.environ, reason="ANCHOR_DATA names no folder of real data"
)
def test_real_files(tmp_path):
    folder = Path(os.environ["ANCHOR_DATA"]) / "train"
    store = open_examples(folder, progress=False)
    assert len(store) == 153_262 and len(store.sizes) == 22
    assert sum(store.sizes.values()) == len(store) == len(store.lengths)
    for path in sorted(folder.glob("*.jsonl.gz"))[::7]:
        listed = read_examples(path)
        mine = store.rows[path.name.removesuffix(".jsonl.gz")]
        assert np.array_equal(np.diff(mine), np.ones(len(mine) - 1)) and store.take(mine) == listed
    assert fingerprint(store) == store.fingerprint


def test_a_test_split_beside_the_training_pairs_is_named(tmp_path):
    folder = tmp_path / "pairs"
    folder.mkdir()
    for name in ("train.jsonl", "nq_test.jsonl"):
        (folder / name).write_text('{"query": "q", "positive": "p"}\n')
    said = []
    assert len(open_examples(folder, say=said.append)) == 2
    assert said == [f"{folder}: read although it may be a test split: nq_test.jsonl"]
    open_examples(folder / "nq_test.jsonl", say=said.append)
    assert len(said) == 1
