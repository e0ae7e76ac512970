"""Vectors and times of an exported model on a CPU: our `Embedder`, sentence-transformers and
onnxruntime take turns on the same texts, in float32, on one thread. Times are the processor time of
this process, on which other programs on the machine have little influence.

`python tests/serving_speed.py MODEL nbs/results/serving_smollm2.json` writes the record of a model
that was exported with its ONNX graph.
"""

import argparse
import json
import os
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from anchor_embedding.common.provenance import device_name, installed_versions, source_commit
from anchor_embedding.data.docstrings import docstring_pairs
from anchor_embedding.embed.embedder import QUERY_INSTRUCTION, Embedder
from anchor_embedding.embed.onnx import ONNX_FILE

PACKAGES = ("python", "torch", "transformers", "sentence_transformers", "onnxruntime", "onnxscript")


class OnnxEmbedder:
    """An exported model used without PyTorch, as `nbs/serving.ipynb` shows it."""

    def __init__(self, folder, threads):
        settings = json.loads((folder / "sentence_bert_config.json").read_text())
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.enable_truncation(settings["max_seq_length"])
        self.tokenizer.enable_padding()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(folder / ONNX_FILE, options)

    def encode(self, texts, batch_size=8):
        order = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
        vectors = {}
        for start in range(0, len(texts), batch_size):
            rows = order[start : start + batch_size]
            batch = self.tokenizer.encode_batch([texts[row] for row in rows])
            inputs = {
                "input_ids": np.array([text.ids for text in batch]),
                "attention_mask": np.array([text.attention_mask for text in batch]),
            }
            found = self.session.run(["sentence_embedding"], inputs)[0]
            vectors |= zip(rows, found, strict=True)
        return np.array([vectors[row] for row in range(len(texts))])


def real_texts(count):
    """Docstrings, some of them joined into long texts; the last is longer than any `max_length`."""
    found = docstring_pairs(packages=["numpy"], heldout=[], cache=False, workers=1).train
    texts = [pair.positive for pair in found[:: len(found) // count][:count]]
    return [*texts, "\n".join(texts[:4]), "\n".join(pair.positive for pair in found[:100])]


def least_cosine(vectors, expected):
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((vectors * expected).sum(1) / lengths).min())


def megabytes(path):
    files = path.rglob("*") if path.is_dir() else [path]
    return round(sum(file.stat().st_size for file in files if file.is_file()) / 1e6, 1)


def measure(folder, count, rounds):
    """The record: smallest cosines to `Embedder`, seconds per text, megabytes."""
    ours = Embedder.from_pretrained(folder, dtype="float32", device="cpu")
    texts = real_texts(count)
    queries = [f"Instruct: {QUERY_INSTRUCTION}\nQuery: {text}" for text in texts]
    theirs = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
    graph = OnnxEmbedder(folder, torch.get_num_threads())
    programs = {
        "Embedder": ours.encode,
        "sentence-transformers": lambda texts: theirs.encode(texts, batch_size=8),
        "onnxruntime": graph.encode,
    }
    expected = ours.encode(texts)
    expected_queries = ours.encode(texts, QUERY_INSTRUCTION)
    seconds = {name: [] for name in programs}
    cosines = {}
    for name, encode in programs.items():  # the first call of each side, which is not timed
        cosines[name] = {
            "texts": least_cosine(encode(texts), expected),
            "queries": least_cosine(encode(queries), expected_queries),
        }
    for _ in range(rounds):
        for name, encode in programs.items():
            start = time.process_time()
            encode(texts)
            seconds[name].append(round((time.process_time() - start) / len(texts), 4))
    sizes = {
        "model.safetensors": megabytes(folder / "model.safetensors"),
        ONNX_FILE: megabytes(folder / "onnx"),
    }
    tokens = [len(text) for text in ours.tokenizer(texts)]
    return {
        "about": {
            "command": shlex.join(["python", *sys.argv]),
            "commit": source_commit(),
            "date": datetime.now(UTC).date().isoformat(),
            "device": device_name(torch.device("cpu")),
            "dtype": "float32",
            "versions": installed_versions(*PACKAGES),
        },
        "texts": len(texts),
        "tokens": {"least": min(tokens), "mean": round(np.mean(tokens), 1), "most": max(tokens)},
        "least_cosine": cosines,
        "seconds_a_text": seconds,
        "megabytes": sizes,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=int, default=46)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    record = measure(args.model, args.texts, args.rounds)
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
