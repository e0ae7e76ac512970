"""One process of a group: trains every task of a list and leaves gradients, weights and losses. Started by test_distributed.py."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from anchor_embedding.data import Example
from anchor_embedding.processes import end_process, whole_tensors
from anchor_embedding.recipe import recipe_from_dict
from anchor_embedding.training import Training, train

STEPS = 4


def silent(text):
    pass


def gradients_and_weights(recipe, out: Path, pairs):
    """Gradients of the first global batch, then weights and losses after a few steps, by rank."""
    run = Training(recipe, out, pairs, say=silent)
    trained = {name: p for name, p in run.decoder.named_parameters() if p.requires_grad}
    run.objective.step(run.model, run.data.batch(0, run.rank, run.world), run.accelerator)
    gradients = whole_tensors({f"gradient {name}": p.grad for name, p in trained.items()})
    run.optimizer.zero_grad()
    losses = [run.step(step)["loss"] for step in range(STEPS)]
    weights = whole_tensors({f"weight {name}": p for name, p in trained.items()})
    save_file({name: value.clone() for name, value in (gradients | weights).items()}, out / f"rank{run.rank}.safetensors")
    (out / f"rank{run.rank}.json").write_text(json.dumps(losses))


def first_vector(embedder):
    """An evaluation that uses the model."""
    return {"first": embedder.encode("one text").tolist()[:4]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    task_file = json.loads(Path(sys.argv[1]).read_text())
    pairs = [Example(q, p, tuple(n), "pairs") for q, p, n in task_file["pairs"]]
    for task in task_file["tasks"]:
        recipe, out = recipe_from_dict(task["recipe"]), Path(task["out"])
        if task["whole_run"]:
            train(recipe, out, pairs, first_vector, resume=task["resume"], progress=False, say=silent)
        else:
            gradients_and_weights(recipe, out, pairs)
    end_process(0)
