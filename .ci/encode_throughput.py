"""Measures the speed and memory of encoding a corpus, compared with sentence-transformers' pool of processes.

python .ci/encode_throughput.py RESULT.json CASE…    with CASE = MODEL:TEXTS or MODEL:TEXTS:SIDE

MODEL is tiny (a random model of 32 dimensions) or smollm2; SIDE is ours or theirs (default: both).
Each side has two processes with OMP_NUM_THREADS threads and goes from one JSONL file to vectors on
disk. Results are added to those already in RESULT.json, so a long run can be split into parts."""

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anchor_embedding.common.files import write_text
from anchor_embedding.common.provenance import device_name, installed_versions, source_commit
from anchor_embedding.common.tiny import tiny_model, tiny_tokenizer
from anchor_embedding.embed.corpus import Corpus, CorpusSettings, encode_corpus
from anchor_embedding.embed.embedder import Embedder, load_embedder
from anchor_embedding.embed.export import export_embedder
from anchor_embedding.model.decoder import CausalDecoder
from anchor_embedding.model.text import TextTokenizer
from anchor_embedding.study.workload import drawn_lengths, plain_words

PROCESSES = 2
DTYPES = {"tiny": "float32", "smollm2": "bfloat16"}
LENGTHS = (16, 0.5)  # mean tokens, standard deviation of their logarithm
# batch sizes; the peer gets the fastest
BATCHES = {"tiny": (32, 128, 512), "smollm2": (8, 32, 128)}
SAMPLE = {"tiny": 4000, "smollm2": 512}  # number of texts for choosing the peer's batch size
PACKAGES = ("anchor_embedding", "python", "torch", "transformers", "sentence-transformers")


# ---- memory


def status_bytes(pid: int, key: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"{key}:\s+(\d+) kB", text)[1]) * 1024


def begin_peak(pid: int) -> int:
    """The present memory of a process; its peak is measured from here on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return status_bytes(pid, "VmRSS")


def peak_added(pid: int, start: int) -> int:
    return status_bytes(pid, "VmHWM") - start


# ---- what is encoded


def make_model(name: str, home: Path) -> Embedder:
    """Writes the model as each side loads it: `anchor` for ours, `export` for theirs."""
    if name == "tiny":
        decoder = CausalDecoder(tiny_model())
        model = Embedder(decoder, TextTokenizer(tiny_tokenizer("smollm2")))
    else:
        model = load_embedder("SmolLM2-135M-Instruct", "stored", "cpu")
    model.save_pretrained(home / "anchor")
    export_embedder(home / "anchor", home / "export")
    return model


def write_texts(path: Path, tokenizer, count: int) -> int:
    """Writes texts of random one-token words; returns the total number of words."""
    generator = np.random.default_rng(0)
    words = plain_words(tokenizer)
    lengths = drawn_lengths(generator, count, *LENGTHS)
    with path.open("w") as file:
        for number, length in enumerate(lengths):
            text = " ".join(generator.choice(words, length))
            file.write(json.dumps({"id": str(number), "text": text}) + "\n")
    return int(lengths.sum())


def read_texts(path: Path) -> tuple[list[str], list[str]]:
    ids = []
    texts = []
    with path.open() as file:
        for line in file:
            row = json.loads(line)
            ids.append(row["id"])
            texts.append(row["text"])
    return ids, texts


# ---- the two sides


def our_settings(count: int) -> CorpusSettings:
    """The default settings, with shards small enough that each process has one."""
    return CorpusSettings(
        columns=(), shard_size=min(CorpusSettings().shard_size, -(-count // PROCESSES))
    )


def our_process(rank: int, home: Path, dtype: str, count: int, ready, answers) -> None:
    embedder = load_embedder(home / "anchor", dtype, "cpu")
    embedder.encode(["The anchor holds the ship."] * 64, progress=False)
    start = begin_peak(os.getpid())
    ready.wait()
    encode_corpus(
        embedder,
        home / "texts.jsonl",
        home / "ours",
        our_settings(count),
        rank=rank,
        world=PROCESSES,
        progress=False,
    )
    answers.put((start, peak_added(os.getpid(), start)))


def ours(home: Path, name: str, count: int) -> dict:
    """Two processes that divide the shards, as `anchor encode --nproc 2` starts them."""
    context = get_context("spawn")
    ready = context.Barrier(PROCESSES + 1)
    answers = context.Queue()
    workers = [
        context.Process(target=our_process, args=(rank, home, DTYPES[name], count, ready, answers))
        for rank in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    ready.wait()
    began = time.monotonic()
    memory = [answers.get() for _ in workers]
    seconds = time.monotonic() - began
    for worker in workers:
        worker.join()
    settings = {"batch_tokens": 8192, "shard_size": our_settings(count).shard_size}
    return {"seconds": seconds, "memory": memory, "settings": settings}


def fastest_batch(model, pool, texts: list[str], sizes: tuple[int, ...]) -> int:
    seconds = {}
    for size in sizes:
        began = time.monotonic()
        model.encode(texts, batch_size=size, pool=pool, show_progress_bar=False)
        seconds[size] = time.monotonic() - began
    return min(seconds, key=seconds.get)


def their_process(home: Path, name: str, answers) -> None:
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        str(home / "export"),
        device="cpu",
        model_kwargs={"dtype": getattr(torch, DTYPES[name]), "attn_implementation": "sdpa"},
    )
    pool = model.start_multi_process_pool(["cpu"] * PROCESSES)
    sample = read_texts(home / "texts.jsonl")[1][: SAMPLE[name]]
    model.encode(sample[:64], pool=pool, chunk_size=32, show_progress_bar=False)
    batch = fastest_batch(model, pool, sample, BATCHES[name])
    pids = [os.getpid(), *(process.pid for process in pool["processes"])]
    starts = [begin_peak(pid) for pid in pids]
    began = time.monotonic()
    ids, texts = read_texts(home / "texts.jsonl")
    vectors = model.encode(texts, batch_size=batch, pool=pool, show_progress_bar=False)
    numbers = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(numbers, vectors.shape[1])
    table = pa.table({"id": ids, "vector": column})
    pq.write_table(table, home / "theirs.parquet", compression="zstd")
    seconds = time.monotonic() - began
    added = [peak_added(pid, start) for pid, start in zip(pids, starts, strict=True)]
    model.stop_multi_process_pool(pool)
    memory = [*zip(starts, added, strict=True)]
    answers.put({"seconds": seconds, "memory": memory, "settings": {"batch_size": batch}})


def theirs(home: Path, name: str, count: int) -> dict:
    """A parent that holds texts and vectors, and two processes that encode chunks."""
    context = get_context("spawn")
    answers = context.Queue()
    worker = context.Process(target=their_process, args=(home, name, answers))
    worker.start()
    answer = answers.get()
    worker.join()
    return answer


SIDES = {"ours": ours, "theirs": theirs}


def smallest_cosine(home: Path) -> float | None:
    """The smallest cosine between the sides' vectors of the first shard; None if one is missing."""
    if not (home / "ours").exists() or not (home / "theirs.parquet").exists():
        return None
    _, one = next(Corpus(home / "ours").blocks())
    column = pq.read_table(home / "theirs.parquet")["vector"].slice(0, len(one))
    other = column.combine_chunks().flatten().to_numpy().reshape(one.shape)
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(((one * other).sum(axis=1) / lengths).min())


# ---- the record


def about(name: str) -> dict:
    import torch

    cpus = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return {
        "command": shlex.join(["python", ".ci/encode_throughput.py", "RESULT.json", *sys.argv[2:]]),
        "commit": source_commit(),
        "device": device_name(torch.device("cpu")).rsplit(",", 1)[0],
        "processor": cpus[1],
        "cores": os.cpu_count(),
        "processes": PROCESSES,
        "threads of a process": torch.get_num_threads(),
        "dtype": DTYPES[name],
        "lengths": LENGTHS,
        "load": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": installed_versions(*PACKAGES),
    }


def figures(result: dict, count: int) -> dict:
    memory = result["memory"]
    return {
        "texts": count,
        "seconds": round(result["seconds"], 2),
        "texts_a_second": round(count / result["seconds"], 1),
        # the peak above the memory of a process with the loaded model
        "added_bytes_of_largest_process": max(added for _, added in memory),
        "added_bytes_of_all_processes": sum(added for _, added in memory),
        "bytes_with_model": [start for start, _ in memory],
        "settings": result["settings"],
    }


def measure(name: str, count: int, sides: list[str], say=print) -> dict:
    home = Path(tempfile.mkdtemp(prefix="throughput-"))
    try:
        tokenizer = make_model(name, home).tokenizer.tokenizer
        tokens = write_texts(home / "texts.jsonl", tokenizer, count)
        record = {"about": about(name), "words": tokens, "sides": {}}
        for side in sides:
            record["sides"][side] = figures(SIDES[side](home, name, count), count)
            say(f"{name}, {count:,} texts, {side}: {record['sides'][side]['texts_a_second']}/s")
        return record | {"smallest_cosine": smallest_cosine(home)}
    finally:
        shutil.rmtree(home)


def main() -> None:
    path = Path(sys.argv[1])
    records = json.loads(path.read_text()) if path.exists() else {"runs": []}
    for case in sys.argv[2:]:
        name, count, *side = case.split(":")
        run = measure(name, int(count), side or [*SIDES])
        records["runs"].append({"model": name, **run})
        write_text(path, json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
