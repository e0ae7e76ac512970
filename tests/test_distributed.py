"""Groups of 2 and 4 processes (gloo, CPU) compute the gradients of one process and reach its weights: both stages,
tied and untied heads, LoRA and full tuning, DDP and FSDP2, whole batches and many micro-batches (GradCache); and every
other objective that does not by design depend on the number of processes."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_worker import run_tasks
from safetensors.torch import load_file

from anchor_embedding.common.tiny import PROSE, tiny_model, tiny_tokenizer
from anchor_embedding.objectives.objective import objective_names
from anchor_embedding.train.recipe import Recipe

WORKER = Path(__file__).with_name("distributed_worker.py")
WORDS = PROSE.split()
# lengths differ widely, and some pairs have hard negatives while others have none, so ranks hold
# different numbers of texts
PAIRS = [
    [
        " ".join(WORDS[i : i + 4]),
        " ".join(WORDS[i + 4 : i + 4 + i * 5 % 23 + 3]),
        [" ".join(WORDS[-i - 7 : -i - 1])] * (i % 3 == 0),
    ]
    for i in range(40)
]
SHARED = {
    "data": "-",
    "steps": 4,
    "batch_size": 8,
    "warmup_steps": 1,
    "max_length": 40,
    "dtype": "float32",
}
STAGES = {
    "reconstruction": {"objective": "reconstruction", "learning_rate": 1e-3},
    "contrastive": {"objective": "contrastive", "learning_rate": 1e-3},
}
OTHERS = {
    "bag_of_tokens": {},
    "contrasted_reconstruction": {"interleave": "step"},
    "distilled_reconstruction": {"bag_weight": 0.2, "reduction": "text_mean"},
    "language_model": {},
    "mntp": {"attention": "bidirectional", "pooling": "mean"},
    "refinement": {"pooling": "mean", "refine_steps": 2, "soft_token_kind": "pause"},
}
STAGES |= {
    name: {"objective": name, "learning_rate": 1e-3, **settings}
    for name, settings in OTHERS.items()
}
TUNING = {"full": {}, "lora": {"tuning": "lora", "lora_rank": 4, "lora_dropout": 0.0}}
BUDGETS = {"whole": 10_000, "parts": 60}
MATRIX = [
    *itertools.product(("reconstruction", "contrastive"), ("tied", "untied"), TUNING, BUDGETS),
    *itertools.product(OTHERS, ("tied",), ("full",), ("parts",)),
]


def start(folder, processes, tasks):
    """Run tasks [(name, recipe, whole run, resume)] in a group of processes; a group of one is this
    process.
    """
    rows = [
        {"recipe": r.to_dict(), "out": str(folder / name), "whole_run": whole, "resume": resume}
        for name, r, whole, resume in tasks
    ]
    if processes == 1:
        run_tasks(PAIRS, rows)
        return
    task_file = folder / f"tasks{processes}-{len(list(folder.iterdir()))}.json"
    task_file.write_text(json.dumps({"pairs": PAIRS, "tasks": rows}))
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, *launch, str(WORKER), str(task_file)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-6000:]


def recipe_of(folder, stage, head, tuning, budget, **more):
    settings = {
        **SHARED,
        **STAGES[stage],
        **TUNING[tuning],
        "token_budget": BUDGETS[budget],
        **more,
    }
    if stage == "distilled_reconstruction":
        settings["teacher"] = str(folder / "untied")
    return Recipe(name="run", base=str(folder / head), **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two base models: tied and untied."""
    folder = tmp_path_factory.mktemp("distributed")
    for head in ("tied", "untied"):
        tiny_model("llama", tied=head == "tied").save_pretrained(folder / head)
        tiny_tokenizer("smollm2").save_pretrained(folder / head)
    return folder


@pytest.fixture(scope="module")
def groups(folder):
    """{(processes, sharding, case): [(tensors, losses) of every rank]}; every group of processes is
    started once.
    """
    found = {}
    for processes, shardings in ((1, ("none",)), (2, ("none", "fsdp")), (4, ("none", "fsdp"))):
        keys = [(processes, sharding, case) for sharding in shardings for case in MATRIX]
        names = {key: "-".join([str(key[0]), key[1], *key[2]]) for key in keys}
        start(
            folder,
            processes,
            [
                (names[key], recipe_of(folder, *key[2], sharding=key[1]), False, False)
                for key in keys
            ],
        )
        for key in keys:
            out = folder / names[key]
            found[key] = [
                (
                    load_file(out / f"rank{r}.safetensors"),
                    json.loads((out / f"rank{r}.json").read_text()),
                )
                for r in range(processes)
            ]
    return found


def test_every_objective_is_compared():
    """`released` averages by process, as the released code does, and is not."""
    assert {*STAGES} == {*objective_names()} - {"released"}


@pytest.mark.thorough
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("case", MATRIX, ids="-".join)
def test_many_processes_equal_one(groups, processes, sharding, case):
    ((alone, losses),) = groups[1, "none", case]
    first, first_losses = groups[processes, sharding, case][0]
    assert first.keys() == alone.keys()
    assert first_losses == pytest.approx(losses, rel=1e-4)
    for tensors, found in groups[processes, sharding, case][1:]:
        assert found == first_losses, "the ranks report different losses"
        assert all(tensors[name].equal(first[name]) for name in first), (
            "the ranks hold different weights"
        )
    for name, expected in alone.items():
        distance = (first[name] - expected).norm() / expected.norm().clamp_min(1e-6)
        assert distance < (1e-4 if name.startswith("gradient") else 1e-3), (
            f"{name} differs by {distance:.1e}"
        )


GATHER = """
import torch
from accelerate import Accelerator
from anchor_embedding.model.ranks import gather_rows

accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
parts = gather_rows(accelerator, torch.full((3 - 2 * rank, 2), float(rank)))
assert [part.tolist() for part in parts] == [[[0.0, 0.0]] * 3, [[1.0, 1.0]]], parts
torch.distributed.destroy_process_group()
"""


@pytest.mark.thorough
def test_rows_are_gathered_where_processes_hold_different_numbers(tmp_path):
    (tmp_path / "gather.py").write_text(GATHER)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launch, str(tmp_path / "gather.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def whole_runs(folder):
    """Sharded runs of two processes, cut back to a checkpoint and continued by four sharded
    processes and by one unsharded process; beside them an unsharded run with an evaluation by each
    number of processes.
    """
    settings = {"checkpoint_every": 2, "eval_every": 2, "sharding": "fsdp"}
    recipes = {
        tuning: recipe_of(folder, "reconstruction", "tied", tuning, "parts", **settings)
        for tuning in TUNING
    }
    evaluated = recipe_of(folder, "reconstruction", "tied", "full", "whole", eval_every=4)
    for name, processes, continued in (
        ("alone", 1, False),
        ("two", 2, False),
        ("four", 4, True),
        ("one", 1, True),
    ):
        for tuning in TUNING if continued else ():
            shutil.copytree(folder / f"{tuning}-two", folder / f"{tuning}-{name}")
            for gone in ("final", "step-000004"):
                shutil.rmtree(folder / f"{tuning}-{name}" / gone)
        tasks = [
            (f"{tuning}-{name}", recipe, True, continued) for tuning, recipe in recipes.items()
        ]
        if name != "one":
            tasks.append((f"evaluated-{processes}", evaluated, True, False))
        start(folder, processes, tasks)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("tuning", TUNING)
def test_sharded_run_goes_on_with_any_number_of_processes(whole_runs, tuning):
    expected = load_file(whole_runs / f"{tuning}-alone" / "final" / "model.safetensors")
    for name in ("two", "four", "one"):
        found = load_file(whole_runs / f"{tuning}-{name}" / "final" / "model.safetensors")
        assert found.keys() == expected.keys()
        for key in expected:
            assert (found[key] - expected[key]).abs().max() < 1e-4, f"{key} of {name}"
        evals = [
            json.loads(line)
            for line in (whole_runs / f"{tuning}-{name}" / "evals.jsonl").read_text().splitlines()
        ]
        assert [line["step"] for line in evals] == [0, 2, 4]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind", ["paper", "sharded", pytest.param("released", marks=pytest.mark.slow)]
)
def test_the_anchor_gain_does_not_depend_on_the_processes(folder, kind):
    """One process and two write the same log, also if each of the two has one pair or a shard of
    the weights, in JSON that every reader accepts.
    """
    settings = {
        "paper": {},
        "sharded": {"sharding": "fsdp", "activation_checkpointing": True},
        "released": {"objective": "released", "micro_batch_size": 1},
    }[kind]
    recipes = {
        pairs: recipe_of(
            folder,
            "reconstruction",
            "tied",
            "full",
            "parts",
            batch_size=pairs,
            anchor_gain_every=2,
            learning_rate=1e-5,
            **settings,
        )
        for pairs in (8, 2)
    }
    for processes in (1, 2):
        tasks = [(f"{kind}-{n}-{processes}", recipe, True, False) for n, recipe in recipes.items()]
        start(folder, processes, tasks)
    for pairs in recipes:
        logs = [folder / f"{kind}-{pairs}-{processes}" / "metrics.jsonl" for processes in (1, 2)]
        alone, shared = (
            [json.loads(line, parse_constant=pytest.fail) for line in log.read_text().splitlines()]
            for log in logs
        )
        for name in ("anchor_gain_q2d", "anchor_gain_d2q", "mean_cosine"):
            one, two = ([line.get(name) for line in lines] for lines in (alone, shared))
            assert one[0] and one[1] and one[3] and one[2] is None
            assert two == [value and pytest.approx(value, rel=1e-3, abs=1e-4) for value in one], (
                name
            )


@pytest.mark.thorough
def test_processes_share_an_evaluation(whole_runs):
    """1, 2 and 4 processes give the same figures, each encoding a share of the texts."""
    logs = {n: whole_runs / f"evaluated-{n}" / "evals.jsonl" for n in (1, 2, 4)}
    found = {
        n: [json.loads(line) for line in log.read_text().splitlines()] for n, log in logs.items()
    }
    assert {
        processes: [line["encoded"] for line in lines] for processes, lines in found.items()
    } == {1: [11, 11], 2: [6, 6], 4: [3, 3]}
    for lines in found.values():
        for line, expected in zip(lines, found[1], strict=True):
            assert line["step"] == expected["step"] and line["one"] == pytest.approx(
                expected["one"], abs=1e-4
            )
            assert torch.allclose(
                torch.tensor(line["first"]), torch.tensor(expected["first"]), atol=1e-4
            )


@pytest.mark.thorough
def test_sharding_in_lower_precision_leaves_the_norms_alone(folder):
    """Norms whose weights bfloat16 cannot represent: two sharded processes still give one process's
    losses.
    """
    for kind in ("llama", "qwen3"):
        model = tiny_model(kind)
        draw = torch.Generator().manual_seed(0)
        for name, p in model.named_parameters():
            if "norm" in name:
                p.data = torch.rand(p.shape, generator=draw) * 3 + 0.5
        model.save_pretrained(folder / f"{kind}-norms")
        tiny_tokenizer("smollm2").save_pretrained(folder / f"{kind}-norms")
    # so slow that weights hardly move: training multiplies differences of rounding, which are not
    # tested here
    settings = {"dtype": "bfloat16", "sharding": "fsdp", "learning_rate": 1e-5}
    recipes = {
        kind: recipe_of(
            folder,
            stage,
            f"{kind}-norms",
            "full",
            "parts",
            **settings,
            activation_checkpointing=again,
        )
        for stage, kind, again in (
            ("reconstruction", "llama", True),
            ("contrastive", "qwen3", False),
        )
    }
    for processes in (1, 2):
        tasks = [(f"{kind}-{processes}", recipe, False, False) for kind, recipe in recipes.items()]
        start(folder, processes, tasks)
    for kind in recipes:
        one, two = (
            json.loads((folder / f"{kind}-{processes}" / "rank0.json").read_text())
            for processes in (1, 2)
        )
        assert two[0] == pytest.approx(one[0], rel=1e-5) and two == pytest.approx(one, rel=2e-3), (
            f"{kind}: {one} and {two}"
        )


@pytest.mark.thorough
def test_lower_precision_noise_and_recomputation(folder):
    """In bfloat16 with activation checkpointing, sharded or not: losses of one process; with LoRA
    dropout (different noise on every rank) the ranks still hold equal weights.
    """
    settings = {"activation_checkpointing": True, "dtype": "bfloat16", "learning_rate": 1e-5}
    quiet = recipe_of(folder, "reconstruction", "tied", "full", "parts").replace(**settings)
    noisy = recipe_of(folder, "contrastive", "tied", "lora", "parts").replace(
        **settings, lora_dropout=0.1
    )
    start(folder, 1, [("quiet-alone", quiet, False, False)])
    kinds = list(itertools.product({"quiet": quiet, "noisy": noisy}.items(), ("none", "fsdp")))
    start(
        folder,
        2,
        [
            (f"{name}-{sharding}", recipe.replace(sharding=sharding), False, False)
            for (name, recipe), sharding in kinds
        ],
    )
    for (name, _), sharding in kinds:
        first, second = (
            load_file(folder / f"{name}-{sharding}" / f"rank{r}.safetensors") for r in range(2)
        )
        assert all(first[key].equal(second[key]) and first[key].isfinite().all() for key in first)
    losses = [
        json.loads((folder / f"quiet-{kind}" / "rank0.json").read_text())
        for kind in ("alone", "none", "fsdp")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3) and losses[2] == pytest.approx(
        losses[0], rel=2e-3
    )


CHOICE = """
import os, sys
from unittest import mock
from anchor_embedding.train import stage as training, prepare
from anchor_embedding.data.examples import Example
from anchor_embedding.model.ranks import end_process
from anchor_embedding.train.pipeline import from_toml

rank = int(os.environ["RANK"])
pairs = [Example(f"query {i}", f"document {i} of them", (), "pairs") for i in range(16)]
with mock.patch.object(prepare, "free_memory", lambda device: (8e9, 1e6)[rank]):
    run = training.open_run(from_toml(open(sys.argv[1]).read()), sys.argv[2], pairs, say=lambda text: None)
open(f"{sys.argv[2]}/chosen{rank}", "w").write(f"{run.objective.token_budget} {run.card['activation_checkpointing']}")
end_process(0)
"""


@pytest.mark.thorough
def test_all_processes_take_the_choice_of_the_one_with_least_memory(folder, tmp_path):
    """All processes choose the same automatic settings, though one of them could take more."""
    automatic = {"activation_checkpointing": "auto", "token_budget": "auto"}
    (tmp_path / "recipe.toml").write_text(
        recipe_of(folder, "contrastive", "tied", "lora", "whole", **automatic).to_toml()
    )
    (tmp_path / "choice.py").write_text(CHOICE)
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        tmp_path / "choice.py",
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    arguments = [sys.executable, *map(str, [*launch, tmp_path / "recipe.toml", tmp_path / "run"])]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    # the longest row
    assert [(tmp_path / "run" / f"chosen{rank}").read_text() for rank in (0, 1)] == ["120 True"] * 2
