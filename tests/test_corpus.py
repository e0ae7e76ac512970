"""A large corpus needs no more memory than a small one; a killed job resumes without gaps or
repeated documents; several processes show one line of progress.
"""

import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from fcntl import ioctl
from struct import pack
from termios import TIOCSWINSZ

import numpy as np
import psutil
import pytest
from tqdm import tqdm

import anchor_embedding.embed.corpus as corpus_module
from anchor_embedding.embed.corpus import Corpus, CorpusSettings, encode_corpus
from anchor_embedding.embed.embedder import Embedder
from conftest import WORDS

MEGABYTE = 2**20


def write_texts(path, count: int) -> list[str]:
    """A JSONL file of different short texts."""
    texts = [f"{WORDS[i % 90]} {WORDS[i % 70]} {i}" for i in range(count)]
    rows = [json.dumps({"id": f"d{i}", "text": text}) for i, text in enumerate(texts)]
    path.write_text("\n".join(rows))
    return texts


def vectors_of(corpus: Corpus) -> np.ndarray:
    return np.concatenate([vectors for _, vectors in corpus.blocks()])


def started(*words, **options) -> subprocess.Popen:
    """Runs `anchor …` in a separate session."""
    command = [sys.executable, "-m", "anchor_embedding", *map(str, words)]
    options = {"stderr": subprocess.DEVNULL, "start_new_session": True} | options
    return subprocess.Popen(command, **options)


# ---- memory


PEAKS = """
import os, re, sys
from pathlib import Path
from anchor_embedding.common.tiny import tiny_model, tiny_tokenizer
from anchor_embedding.embed.corpus import CorpusSettings, encode_corpus
from anchor_embedding.embed.embedder import Embedder
from anchor_embedding.model.decoder import CausalDecoder
from anchor_embedding.model.text import TextTokenizer

home = Path(sys.argv[1])
model = tiny_model(num_hidden_layers=1, hidden_size=256)
model = Embedder(CausalDecoder(model), TextTokenizer(tiny_tokenizer("smollm2"), max_length=64))
settings = CorpusSettings(shard_size=5_000)
for name in ("few", "many"):
    encode_corpus(model, home / f"{name}.jsonl", home / name, settings, progress=False)
    print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Ten shards need at most 24 MB more than one. The vectors of the other nine would take 44 MB
    if kept, and their documents about as much.
    """
    write_texts(tmp_path / "few.jsonl", 5_000)
    write_texts(tmp_path / "many.jsonl", 50_000)
    script = tmp_path / "peaks.py"
    script.write_text(PEAKS)
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    few, many = (int(line) * 1024 for line in done.stdout.split())
    print(f"{(many - few) / MEGABYTE:.1f} MB more for ten shards than for one")
    assert len(Corpus(tmp_path / "many")) == 50_000
    assert many - few < 24 * MEGABYTE


# ---- interruption


COUNT = 6_000


@pytest.fixture(scope="module")
def killed_corpus(base, tmp_path_factory):
    """The folder of a corpus, its texts, and the vectors of an uninterrupted job."""
    home = tmp_path_factory.mktemp("corpus")
    texts = write_texts(home / "corpus.jsonl", COUNT)
    model = Embedder.from_pretrained(base, dtype="float32")
    return home, texts, model.encode(texts, progress=False)


def a_worker(parent: psutil.Process) -> list[psutil.Process]:
    return parent.children()[1:]


def the_parent(parent: psutil.Process) -> list[psutil.Process]:
    return [parent]


def all_of_them(parent: psutil.Process) -> list[psutil.Process]:
    return [parent, *parent.children()]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "victims",
    [a_worker, *(pytest.param(who, marks=pytest.mark.slow) for who in (the_parent, all_of_them))],
)
def test_two_processes_killed_in_the_middle(base, killed_corpus, tmp_path, victims):
    """SIGKILL to a worker, to the process that started the workers, or to all at once, as in a
    power failure: no process survives, the finished shards are complete, and `--resume` does the
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
    for process in victims(parent):
        process.kill()
    # the others are ended too
    assert job.wait(timeout=120) != 0
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


# ---- what a user sees


def on_a_terminal(*words) -> list[str]:
    """The lines, including redrawn ones, that a command writes to a terminal of 100 columns."""
    screen, end = pty.openpty()
    ioctl(end, TIOCSWINSZ, pack("HHHH", 40, 100, 0, 0))
    job = started(*words, stderr=end)
    os.close(end)
    written = b""
    while True:
        try:
            part = os.read(screen, 65536)
        except OSError:  # no process has the terminal open any more
            break
        if not part:
            break
        written += part
    os.close(screen)
    assert job.wait(timeout=120) == 0, written
    return [line for line in re.split(r"[\r\n]+", written.decode()) if line.strip()]


@pytest.mark.thorough
def test_several_processes_show_one_line(base, tmp_path):
    """One bar, that of the first process; after an interruption it begins at what was done before."""
    write_texts(tmp_path / "corpus.jsonl", 3_000)
    words = ["encode", base, "--in", tmp_path / "corpus.jsonl", "--out", tmp_path / "vectors"]
    words += ["--dtype", "float32", "--shard-size", "500", "--nproc", "2"]
    lines = on_a_terminal(*words)
    bars = [line for line in lines if line.startswith("encode:")]
    assert lines[-1].startswith("3,000 vectors") and len(lines) == len(bars) + 1, lines
    counts = [int(re.search(r" (\d+)/3000 ", line)[1]) for line in bars]
    # a second bar would begin again
    assert counts == sorted(counts) and counts[0] == 0 and 1_500 <= counts[-1] <= 3_000, lines
    assert re.search(r"\[\d\d:\d\d<\d\d:\d\d", bars[-1]), bars[-1]

    (tmp_path / "vectors" / "shard-00004.parquet").unlink()  # the shards of the first process
    lines = on_a_terminal(*words, "--resume")
    assert " 2500/3000 " in lines[0], lines


def test_the_line_counts_what_other_processes_write(base, tmp_path, monkeypatch):
    """The bar of the first of two processes reaches all documents even if the other finishes first."""
    write_texts(tmp_path / "corpus.jsonl", 90)
    model = Embedder.from_pretrained(base, dtype="float32")
    settings = CorpusSettings(shard_size=10)
    given = (model, tmp_path / "corpus.jsonl")
    encode_corpus(*given, tmp_path / "whole", settings, progress=False)
    write = corpus_module._write_shard

    def meanwhile(path, *rest):
        write(path, *rest)
        for number in range(1, 9, 2):  # the shards of the second process
            shutil.copy(tmp_path / "whole" / f"shard-{number:05d}.parquet", path.parent)

    bars = []

    @contextmanager
    def kept(total, desc, unit, initial, progress):
        bars.append(tqdm(total=total, initial=initial, file=io.StringIO()))
        yield bars[0]

    monkeypatch.setattr(corpus_module, "_write_shard", meanwhile)
    monkeypatch.setattr(corpus_module, "progress_bar", kept)
    encode_corpus(*given, tmp_path / "half", settings, rank=0, world=2)
    assert bars[0].n == 90
    np.testing.assert_array_equal(*(vectors_of(Corpus(tmp_path / n)) for n in ("whole", "half")))
