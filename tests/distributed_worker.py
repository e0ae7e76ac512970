"""One process of a training run: five steps of a recipe, then its weights on disk. Started by test_distributed.py."""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from anchor_embedding.data import Example
from anchor_embedding.recipe import recipe_from_dict
from anchor_embedding.training import Training

if __name__ == "__main__":
    torch.set_num_threads(1)
    task = json.loads(Path(sys.argv[1]).read_text())
    pairs = [Example(q, p, tuple(n), "pairs") for q, p, n in task["pairs"]]
    run = Training(recipe_from_dict(task["recipe"]), task["out"], pairs, say=lambda text: None)
    losses = [run.step(step)["loss"] for step in range(5)]
    weights = {name: p.detach().clone() for name, p in run.decoder.named_parameters() if p.requires_grad}
    save_file(weights, Path(task["out"]) / f"rank{run.rank}.safetensors")
    (Path(task["out"]) / f"rank{run.rank}.json").write_text(json.dumps(losses))
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()
    # All is on disk and the group is left; what follows is only torch's teardown of its threads, which aborts now and
    # then on a loaded machine ("terminate called without an active exception") and says nothing about training.
    sys.stdout.flush()
    os._exit(0)
