"""One process of a group: trains every task of a list and writes gradients, weights and losses.
Started by test_distributed.py.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from anchor_embedding.data.examples import Example
from anchor_embedding.model.ranks import end_process, whole_tensors
from anchor_embedding.train.recipe import recipe_from_dict
from anchor_embedding.train.stage import open_run, train

STEPS = 4


def silent(text):
    pass


def gradients_and_weights(recipe, out: Path, pairs):
    """Gradients of the first global batch, then weights and losses after a few steps, for each
    rank.
    """
    run = open_run(recipe, out, pairs, say=silent)
    trained = {name: p for name, p in run.decoder.named_parameters() if p.requires_grad}
    run.objective.step(run.model, run.data.batch(0, run.rank, run.world), run.accelerator)
    gradients = whole_tensors({f"gradient {name}": p.grad for name, p in trained.items()})
    run.optimizer.zero_grad()
    losses = [run.step(step)["loss"] for step in range(STEPS)]
    weights = whole_tensors({f"weight {name}": p for name, p in trained.items()})
    save_file(
        {name: value.clone() for name, value in (gradients | weights).items()},
        out / f"rank{run.rank}.safetensors",
    )
    (out / f"rank{run.rank}.json").write_text(json.dumps(losses))


def some_figures(embedder):
    """An evaluation that uses the model: 11 texts, divided among the processes."""
    texts = [f"one text {'and more ' * n}" for n in range(11)]
    counts = []
    hook = embedder.decoder.register_forward_pre_hook(
        lambda module, arguments: counts.append(len(arguments[1].cu_seqlens) - 1)
    )
    vectors = embedder.encode(
        texts, [None, "find it"] * 5 + [None], batch_tokens=40, normalize=True
    )
    hook.remove()
    return {
        "first": vectors[:, :2].tolist(),
        "one": embedder.encode("one text").tolist()[:4],
        "encoded": sum(counts),
    }


def run_tasks(pairs, tasks):
    """Run each task, a dictionary with recipe, out, whole_run and resume, in this process."""
    examples = [Example(q, p, tuple(n), "pairs") for q, p, n in pairs]
    for task in tasks:
        recipe = recipe_from_dict(task["recipe"])
        out = Path(task["out"])
        if task["whole_run"]:
            train(
                recipe,
                out,
                examples,
                some_figures,
                resume=task["resume"],
                progress=False,
                say=silent,
            )
        else:
            gradients_and_weights(recipe, out, examples)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_tasks(**json.loads(Path(sys.argv[1]).read_text()))
    end_process(0)
