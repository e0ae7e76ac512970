"""Stage I compares its gradient in float32 with that in the run's dtype: the figure and the warning
are right, and nothing else changes.
"""

import json
import os
import shutil
import subprocess
import sys
import warnings
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from anchor_embedding.cli.main import main
from anchor_embedding.common.tiny import PROSE, tiny_model, tiny_tokenizer
from anchor_embedding.data.examples import Example
from anchor_embedding.train import stage as training
from anchor_embedding.train.prepare import make_data, prepare_embedder
from anchor_embedding.train.recipe import Recipe
from anchor_embedding.train.runs import read_log
from anchor_embedding.train.stage import compare_gradients, dry_run, open_run, train

WORDS = PROSE.split()
PAIRS = [
    Example(" ".join(WORDS[i : i + 5]), " ".join(WORDS[i + 5 : i + 17]), (), "prose")
    for i in range(0, 96, 3)
]
SHARED = {
    "data": "-",
    "steps": 4,
    "batch_size": 8,
    "warmup_steps": 1,
    "learning_rate": 1e-3,
    "max_length": 40,
    "dtype": "bfloat16",
}
LORA = {"tuning": "lora", "lora_rank": 4, "lora_dropout": 0.5}


def quiet(text):
    pass


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A model whose gradient changes little when rounded to bfloat16, and one whose gradient does
    not survive it.
    """
    folder = tmp_path_factory.mktemp("gradients")
    for name, settings in {
        "calm": {"initializer_range": 0.1},
        "rough": {"initializer_range": 1.0, "num_hidden_layers": 8},
    }.items():
        tiny_model("llama", **settings).save_pretrained(folder / name)
        tiny_tokenizer("smollm2").save_pretrained(folder / name)
    return folder


def recipe_of(bases, base="calm", **settings):
    return Recipe(
        name="run", base=str(bases / base), **SHARED, **({"objective": "reconstruction"} | settings)
    )


def naive_cosine(recipe):
    """Two models loaded one after the other, with two plain backward passes."""
    flat = []
    for dtype in ("float32", "bfloat16"):
        embedder, _ = prepare_embedder(recipe.replace(dtype=dtype), torch.device("cpu"), say=quiet)
        batch = make_data(recipe, embedder.tokenizer, PAIRS).batch(0).take([0, 1])
        decoder = embedder.decoder.eval()
        objective = recipe.objective.prepared(embedder.tokenizer)
        if recipe.objective.name == "released":
            objective.weighted(decoder(objective.means, batch)).backward()
        else:
            q2d, d2q = decoder(objective.sums, batch, ["q2d", "d2q"])
            scored = [
                sum(len(text.body) for text in side) for side in (batch.positives, batch.queries)
            ]
            (0.2 * q2d / scored[0] + 0.8 * d2q / scored[1]).backward()
        flat.append(
            torch.cat(
                [p.grad.flatten() for p in decoder.parameters() if p.grad is not None]
            ).double()
        )
    return torch.cosine_similarity(*flat, dim=0).item()


@pytest.mark.parametrize(
    "settings",
    [{}, {"decode_opening": "none"}, {"objective": "released"}, LORA],
    ids=["full", "none", "released", "lora"],
)
@pytest.mark.parametrize("base", ["calm", pytest.param("rough", marks=pytest.mark.thorough)])
@pytest.mark.filterwarnings("ignore:over 2 pairs")
def test_the_cosine_is_that_of_two_plain_backward_passes(bases, base, settings):
    recipe = recipe_of(bases, base, **settings)
    found = dry_run(recipe, PAIRS, say=quiet)["gradient_cosine"]
    assert found == pytest.approx(naive_cosine(recipe), abs=1e-3)


def test_a_gradient_that_rounding_turns_is_warned_of(bases):
    with pytest.warns(
        UserWarning,
        match=r"over 2 pairs .* float32 and in bfloat16 have a cosine of -?0\.\d\d: .*; set dtype = \"float32\"$",
    ):
        dry_run(recipe_of(bases, "rough"), PAIRS, say=quiet)
    with pytest.warns(UserWarning, match=r'or decode_opening = "encode"$'):
        dry_run(recipe_of(bases, "rough", decode_opening="none"), PAIRS, say=quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert dry_run(recipe_of(bases), PAIRS, say=quiet)["gradient_cosine"] > 0.95


def test_what_is_not_compared_and_why(bases):
    def compared(recipe, free=1e12, world=1):
        embedder, _ = prepare_embedder(recipe, torch.device("cpu"), say=quiet)
        batch = make_data(recipe, embedder.tokenizer, PAIRS).batch(0)
        with mock.patch.object(training, "free_memory", lambda device: free):
            return compare_gradients(recipe, embedder, batch, world), sum(
                p.numel() for p in embedder.decoder.parameters()
            )

    recipe = recipe_of(bases)
    found, parameters = compared(recipe)
    assert found.keys() == {"cosine", "pairs"} and found["pairs"] == 2
    assert compared(recipe.replace(dtype="float32"))[0] == {"skipped": "products are in float32"}
    assert compared(recipe, free=16 * parameters)[0] == found
    assert compared(recipe, free=16 * parameters - 2)[0] == {
        "skipped": "too little memory for two more gradients"
    }
    sharded = recipe.replace(sharding="fsdp")
    assert (
        compared(sharded, world=2)[0] == {"skipped": "the weights are sharded"}
        and compared(sharded)[0] == found
    )
    search = Recipe(name="run", base=recipe.base, objective="contrastive", **SHARED)
    assert compared(search)[0] == {"skipped": "not Stage I"}
    assert "gradient_cosine" not in dry_run(recipe.replace(dtype="float32"), PAIRS, say=quiet)


def state_of(run):
    decoder = run.decoder
    modes = [module.training for module in decoder.modules()]
    grads = [p.grad for p in decoder.parameters()]
    return modes, grads, decoder.compute_dtype, torch.get_rng_state().tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"input_dropout": 0.3},
        pytest.param(LORA | {"activation_checkpointing": True}, marks=pytest.mark.thorough),
    ],
    ids=["full", "lora"],
)
def test_a_run_is_the_same_with_and_without(bases, tmp_path, settings):
    recipe = recipe_of(bases, checkpoint_every=2, **settings)
    final = {}
    curves = {}
    for name in ("with", "without"):
        patch = (
            mock.patch.object(training, "compare_gradients", lambda *args: {})
            if name == "without"
            else mock.MagicMock()
        )
        with patch:
            final[name] = load_file(
                train(recipe, tmp_path / name, PAIRS, progress=False, say=quiet)
                / "model.safetensors"
            )
        curves[name] = [
            (line["loss"], line["grad_norm"])
            for line in read_log(tmp_path / name / "metrics.jsonl")
        ]
    assert curves["with"] == curves["without"]
    assert all(torch.equal(final["with"][key], final["without"][key]) for key in final["without"])
    card = tmp_path / "with" / "card.json"
    kept = json.loads(card.read_text())["gradients"]
    assert kept["cosine"] > 0.9
    for gone in ("final", "step-000004"):
        shutil.rmtree(tmp_path / "with" / gone)
    resumed = load_file(
        train(recipe, tmp_path / "with", PAIRS, resume=True, progress=False, say=quiet)
        / "model.safetensors"
    )
    assert all(torch.equal(resumed[key], final["without"][key]) for key in resumed)
    assert json.loads(card.read_text())["gradients"] == kept, (
        "a resumed run keeps what was measured at its start"
    )


def test_the_comparison_leaves_nothing_behind(bases, tmp_path):
    run = open_run(recipe_of(bases, **LORA), tmp_path / "run", PAIRS, say=quiet)
    torch.manual_seed(7)
    before = state_of(run)
    assert "cosine" in compare_gradients(run.recipe, run.embedder, run.data.batch(0))
    assert state_of(run) == before and all(before[0]) and before[1] == [None] * len(before[1])
    run.close()


WORKER = """
import sys
from pathlib import Path
from unittest import mock
import torch
sys.path.insert(0, {tests!r})
from test_gradients import PAIRS, SHARED, quiet
from anchor_embedding.train import stage as training
from anchor_embedding.model.ranks import end_process
from anchor_embedding.train.recipe import Recipe
torch.set_num_threads(1)
for name in ("with", "without"):
    patch = mock.patch.object(training, "compare_gradients", lambda *args: {{}}) if name == "without" else mock.MagicMock()
    with patch:
        recipe = Recipe(name="run", base={base!r}, objective="reconstruction", **SHARED)
        training.train(recipe, Path({out!r}) / name, PAIRS, progress=False, say=quiet)
end_process(0)
"""


@pytest.mark.thorough
def test_two_processes_train_the_same_with_and_without(bases, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        WORKER.format(tests=os.path.dirname(__file__), base=str(bases / "calm"), out=str(tmp_path))
    )
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    done = subprocess.run(launch, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found, expected = (
        load_file(tmp_path / name / "final" / "model.safetensors") for name in ("with", "without")
    )
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    card = json.loads((tmp_path / "with" / "card.json").read_text())
    assert card["processes"] == 2 and card["gradients"]["cosine"] > 0.9


def test_the_command_line_says_it(bases, tmp_path, capsys):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(
        "".join(
            json.dumps({"query": pair.query, "positive": pair.positive}) + "\n" for pair in PAIRS
        )
    )
    settings = {
        "base": bases / "rough",
        "data": pairs,
        "batch_size": 8,
        "max_length": 40,
        "dtype": "bfloat16",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    assert main(["train", "stage1", "--dry-run", *words]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["gradient_cosine"] < 0.9
    assert [
        line
        for line in printed.err.splitlines()
        if line.startswith("note: over 2 pairs Stage I's gradients")
    ]
