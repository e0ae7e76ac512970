"""Bad inputs of every command and kind give exit code 2 and one line, and write nothing.

By default a sample runs, with `--run-slow` every case; `tests/fuzz.json` has the counts of a complete run.
"""

import json

import numpy as np
import pytest
from fuzz_inputs import RESULTS, all_cases, fault_of, workplace

from anchor_embedding.cli.main import main
from anchor_embedding.common.errors import InputError
from anchor_embedding.data.store import open_examples
from anchor_embedding.embed.corpus import Corpus

CASES = all_cases()
EVERY = 12  # of these one is in the sample


@pytest.fixture(scope="module")
def place():
    with workplace() as folders:
        yield folders


def faults(cases, place):
    return {case.key: fault for case in cases if (fault := fault_of(case, *place))}


def test_a_sample_of_bad_inputs(place):
    failed_once = json.loads(RESULTS.read_text("utf-8"))["faults"]
    chosen = [case for n, case in enumerate(CASES) if n % EVERY == 0 or case.key in failed_once]
    assert faults(chosen, place) == {}


@pytest.mark.slow
def test_every_bad_input(place):
    assert faults(CASES, place) == {}


def test_there_are_many_and_each_once():
    assert len(CASES) >= 600
    assert len({(case.words, case.name) for case in CASES}) >= 600


def test_the_record_is_of_a_whole_run():
    kept = json.loads(RESULTS.read_text("utf-8"))
    about = kept["about"]
    assert about["inputs"] == sum(kept["commands"].values()) == sum(kept["kinds"].values()) >= 600
    assert about["faults"] == len(kept["faults"])


def test_a_damaged_store_of_the_same_size_is_made_again(tmp_path, monkeypatch):
    """With damage at many places in the file, either the store is read again, or the message names
    its file.
    """
    monkeypatch.setenv("ANCHOR_CACHE", str(tmp_path / "cache"))
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"query": f"query {i}", "positive": f"document {i}"} for i in range(50)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    good = list(open_examples(pairs))
    (rows,) = (tmp_path / "cache").rglob("rows.arrow")
    whole = rows.read_bytes()
    for number in range(16):
        place = number * (len(whole) - 1) // 15
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        rows.write_bytes(bytes(damaged))
        said = []
        assert list(open_examples(pairs, say=said.append)) == good
        assert len(said) == 1 and "rows.arrow" in said[0]
        assert rows.read_bytes() == whole


def test_a_damaged_shard_of_the_same_size_is_named(place):
    """Its pages have checksums, so no byte of a vector can change unnoticed."""
    good, _ = place
    corpus = Corpus(good / "vectors")
    shard = good / "vectors" / "shard-00001.parquet"
    whole = shard.read_bytes()
    vectors_before = np.concatenate([vectors for _, vectors in corpus.blocks()])
    noticed = 0
    column = corpus._open(1).metadata.row_group(0).column(2)
    first = column.dictionary_page_offset
    last = first + column.total_compressed_size - 40
    try:
        for number in range(64):
            damaged = bytearray(whole)
            damaged[first + 40 + number * (last - first - 40) // 64] ^= 0xFF
            shard.write_bytes(bytes(damaged))
            try:
                found = [vectors for _, vectors in Corpus(good / "vectors").blocks()]
            except InputError as error:
                assert "shard-00001" in str(error)
                noticed += 1
            else:  # a byte of a page's header on which nothing depends
                np.testing.assert_array_equal(np.concatenate(found), vectors_before)
        assert noticed > 40
    finally:
        shard.write_bytes(whole)


def test_a_sweep_without_checkpoints_scores_the_result(place, tmp_path, capsys):
    import shutil

    good, _ = place
    run = shutil.copytree(good / "run", tmp_path / "run")
    for folder in run.glob("step-*"):
        shutil.rmtree(folder)
    words = ["sweep", str(run), "--tasks-dir", str(good / "tasks"), "--dtype", "float32"]
    assert main(words) == 0
    (line,) = (run / "evals.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 2
    shutil.rmtree(run / "final")
    assert main(words) == 2
    assert "checkpoint_every" in capsys.readouterr().err


def test_a_plan_says_what_it_rests_on(capsys):
    assert main(["plan", "stage2", "--set", "data=mined.jsonl"]) == 0
    line = capsys.readouterr().err.strip()
    assert "Llama-3.2-1B-Instruct" in line and "mined.jsonl was not measured" in line
