"""A job that is killed goes on without a gap and without a document twice."""

import json
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from anchor_embedding.common.tiny import PROSE
from anchor_embedding.embed.corpus import Corpus
from anchor_embedding.embed.embedder import Embedder

WORDS = PROSE.split()


def write_texts(path, count: int) -> list[str]:
    """A JSONL file of short texts that differ."""
    texts = [f"{WORDS[i % 90]} {WORDS[i % 70]} {i}" for i in range(count)]
    rows = [json.dumps({"id": f"d{i}", "text": text}) for i, text in enumerate(texts)]
    path.write_text("\n".join(rows))
    return texts


def vectors_of(corpus: Corpus) -> np.ndarray:
    return np.concatenate([vectors for _, vectors in corpus.blocks()])


def started(*words, **options) -> subprocess.Popen:
    """`anchor …` in a session of its own."""
    command = [sys.executable, "-m", "anchor_embedding", *map(str, words)]
    options = {"stderr": subprocess.DEVNULL, "start_new_session": True} | options
    return subprocess.Popen(command, **options)


COUNT = 6_000


@pytest.fixture(scope="module")
def killed_corpus(base, tmp_path_factory):
    """The folder of a corpus, its texts, and the vectors of a job that nothing stopped."""
    home = tmp_path_factory.mktemp("corpus")
    texts = write_texts(home / "corpus.jsonl", COUNT)
    model = Embedder.from_pretrained(base, dtype="float32")
    return home, texts, model.encode(texts, progress=False)


def test_one_of_two_processes_killed_in_the_middle(base, killed_corpus, tmp_path):
    """SIGKILL to a process: the other is ended, what is there is whole, and `--resume` does the
    rest.
    """
    home, texts, wanted = killed_corpus
    words = ["encode", base, "--in", home / "corpus.jsonl", "--out", tmp_path / "vectors"]
    words += ["--dtype", "float32", "--shard-size", "100"]
    job = started(*words, "--nproc", "2")

    def shards() -> list[str]:
        return sorted(path.name for path in (tmp_path / "vectors").glob("shard-*.parquet"))

    def written(name: str) -> int:
        return (tmp_path / "vectors" / name).stat().st_mtime_ns

    end = time.monotonic() + 120
    while len(shards()) < 3 and time.monotonic() < end and job.poll() is None:
        time.sleep(0.005)
    parent = psutil.Process(job.pid)
    children = parent.children()
    children[1].kill()
    # the other one is ended with it
    assert job.wait(timeout=60) != 0
    psutil.wait_procs(children, timeout=10)
    assert not any(process.is_running() for process in children)
    before = {name: written(name) for name in shards()}
    assert 3 <= len(before) < COUNT / 100, len(before)

    assert started(*words, "--nproc", "2", "--resume").wait(timeout=200) == 0
    corpus = Corpus(tmp_path / "vectors")
    assert [row["id"] for row in corpus.rows(range(len(corpus)))] == [f"d{i}" for i in range(COUNT)]
    assert [row["text"] for row in corpus.rows(range(len(corpus)))] == texts
    np.testing.assert_allclose(vectors_of(corpus), wanted, rtol=1e-4, atol=1e-5)
    assert {name: written(name) for name in before} == before
