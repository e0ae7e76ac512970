"""A full disk at any moment of a run gives one clear error; nothing is half-written, and the last
good state stays intact.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from anchor_embedding.common.tiny import PROSE, tiny_model, tiny_tokenizer
from anchor_embedding.embed.embedder import Embedder

WORDS = PROSE.split()
TRAIN = """
import json, resource, sys
from anchor_embedding.cli.main import main

# the limit that plays the full disk is set when training writes its checkpoint of this step
import anchor_embedding.train.loop as training
limited, real = int(sys.argv[1]), training.save_checkpoint

def save_checkpoint(folder, *arguments):
    if folder.name == f"step-{limited:06}":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    real(folder, *arguments)

training.save_checkpoint = save_checkpoint
sys.exit(main(sys.argv[3:]))
"""


def train(tmp_path, limited_step, limit, *more):
    """`anchor train` with a limit on file sizes, from the checkpoint of a step."""
    pairs = tmp_path / "pairs.jsonl"
    rows = [
        {"query": " ".join(WORDS[i : i + 5]), "positive": " ".join(WORDS[i + 5 : i + 17])}
        for i in range(0, 80, 2)
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not (tmp_path / "base").exists():
        tiny_model("llama").save_pretrained(tmp_path / "base")
        tiny_tokenizer("smollm2").save_pretrained(tmp_path / "base")
    values = [
        f"base={tmp_path / 'base'}",
        f"data={pairs}",
        "batch_size=8",
        "max_length=40",
        "steps=6",
        "dtype=float32",
        "checkpoint_every=2",
    ]
    overrides = [part for value in values for part in ("--set", value)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", TRAIN, str(limited_step), str(limit), "train", "stage1", *overrides, "--out", str(tmp_path / "run"), *more],
        capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip


@pytest.mark.thorough
# inside the weights; after them, inside the optimizer's state
@pytest.mark.parametrize("limit", [pytest.param(20_000, marks=pytest.mark.slow), 120_000])
def test_full_disk_while_saving(tmp_path, limit):
    done = train(tmp_path, 4, limit)
    assert done.returncode == 2, done.stderr
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("anchor: ")]
    assert (
        "cannot write" in message
        and "nothing half-written" in message
        and "Traceback" not in done.stderr
    )
    run = tmp_path / "run"
    assert sorted(path.name for path in run.iterdir()) == [
        "card.json",
        "metrics.jsonl",
        "recipe.toml",
        "step-000002",
    ]
    Embedder.from_pretrained(run / "step-000002")
    resumed = train(tmp_path, -1, 0, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
    Embedder.from_pretrained(run / "final")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["model.safetensors", pytest.param("optimizer.safetensors", marks=pytest.mark.slow)]
)
def test_damaged_checkpoint_is_named(tmp_path, name):
    assert train(tmp_path, -1, 0).returncode == 0
    run = tmp_path / "run"
    (run / "step-000006" / name).write_bytes(b"")
    done = train(tmp_path, -1, 0, "--resume")
    assert done.returncode == 2 and "step-000006" in done.stderr and "Traceback" not in done.stderr
    shutil.rmtree(run / "step-000006")
    assert train(tmp_path, -1, 0, "--resume").returncode == 0


@pytest.mark.thorough
def test_full_disk_while_encoding(tmp_path):
    """Finished shards stay, and the rest is encoded once there is room again."""
    train(tmp_path, -1, 0)
    (tmp_path / "texts.txt").write_text("one text\n" * 500)
    code = (
        "import resource, sys; from anchor_embedding.cli.main import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, -1)); sys.exit(main())"
    )
    words = ["encode", str(tmp_path / "run" / "final"), "--in", str(tmp_path / "texts.txt")]
    words += ["--out", str(tmp_path / "out" / "vectors.npy")]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        timeout=300,
    )
    assert done.returncode == 2 and "cannot write" in done.stderr and "Traceback" not in done.stderr
    kept = tmp_path / "out" / ".vectors.npy.shards"
    assert {path.name for path in kept.iterdir()} <= {"corpus.json", "shard-00000.parquet"}
    assert not (tmp_path / "out" / "vectors.npy").exists()
    again = [sys.executable, "-m", "anchor_embedding", *words]
    if (kept / "corpus.json").exists():
        again.append("--resume")
    subprocess.run(again, capture_output=True, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["vectors.npy"]
