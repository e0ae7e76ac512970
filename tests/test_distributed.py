"""Two processes (gloo, CPU) train to the weights of one, and hold equal weights: both stages, DDP."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from anchor_embedding.recipe import Recipe
from anchor_embedding.testing import PROSE, tiny_model, tiny_tokenizer

WORKER = Path(__file__).with_name("distributed_worker.py")
WORDS = PROSE.split()
# some pairs have hard negatives and some have none, so the processes hold different numbers of texts
PAIRS = [
    [" ".join(WORDS[i : i + 4]), " ".join(WORDS[i + 4 : i + 4 + i % 9 + 3]), [" ".join(WORDS[-i - 7 : -i - 1])] * (i % 3 == 0)]
    for i in range(40)
]
SHARED = {"data": "-", "steps": 5, "batch_size": 8, "warmup_steps": 1, "max_length": 40, "dtype": "float32"}
STAGES = {
    "reconstruction": {"objective": "reconstruction", "learning_rate": 1e-3},
    "contrastive": {"objective": "contrastive", "tuning": "lora", "lora_rank": 4, "lora_dropout": 0.0, "learning_rate": 1e-2},
}


def run(folder, recipe, processes):
    """Weights and losses of every rank after five steps."""
    out = folder / f"out{processes}"
    task = folder / f"task{processes}.json"
    task.write_text(json.dumps({"recipe": recipe.to_dict(), "out": str(out), "pairs": PAIRS}))
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *launch, str(WORKER), str(task)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return [(load_file(out / f"rank{r}.safetensors"), json.loads((out / f"rank{r}.json").read_text())) for r in range(processes)]


@pytest.mark.parametrize(("stage", "tied", "token_budget"), [
    ("reconstruction", True, 10_000), ("reconstruction", False, 60), ("contrastive", False, 10_000), ("contrastive", True, 60),
])  # fmt: skip
def test_two_processes_equal_one(tmp_path, stage, tied, token_budget):
    tiny_model("llama", tied=tied).save_pretrained(tmp_path / "base")
    tiny_tokenizer("smollm2").save_pretrained(tmp_path / "base")
    recipe = Recipe(name="run", base=str(tmp_path / "base"), token_budget=token_budget, **SHARED, **STAGES[stage])
    (alone, losses), (first, first_losses), (second, second_losses) = run(tmp_path, recipe, 1) + run(tmp_path, recipe, 2)
    assert first.keys() == second.keys() == alone.keys()
    assert first_losses == second_losses == pytest.approx(losses, rel=1e-4)
    for name in alone:
        assert first[name].equal(second[name]), f"the ranks differ in {name}"
        assert (first[name] - alone[name]).abs().max() < 1e-4, f"two processes differ from one in {name}"
