"""GIRCSE end to end on tiny models: trained by a recipe, stopped and resumed, saved as weights and as adapters, loaded,
and encoding with any number of steps; several processes compute the same as one."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_distributed import PAIRS, start

from anchor_embedding.cli.main import main
from anchor_embedding.common.errors import InputError
from anchor_embedding.common.tiny import tiny_model, tiny_tokenizer
from anchor_embedding.data.examples import Example
from anchor_embedding.embed.embedder import Embedder
from anchor_embedding.embed.export import export_embedder
from anchor_embedding.evaluate.heldout import split_pairs
from anchor_embedding.evaluate.retrieval import rank_metrics
from anchor_embedding.model.loading import merge_lora
from anchor_embedding.model.soft_tokens import SoftTokens
from anchor_embedding.train.recipe import Recipe
from anchor_embedding.train.stage import dry_run, train

EXAMPLES = [
    Example(query, positive, tuple(negatives), "pairs") for query, positive, negatives in PAIRS
]
TEXTS = ["The anchor holds the ship.", "", "A query asks in a few words. " * 20, "錨は船を支える。"]
SHARED = dict(
    name="run", objective="refinement", pooling="mean", data="-", steps=4, batch_size=8, warmup_steps=1, learning_rate=1e-2, max_length=40,
    dtype="float32", refine_steps=3, token_budget=60,
)  # fmt: skip
TOKENS = len(tiny_tokenizer("smollm2"))
LORA = dict(tuning="lora", lora_rank=4, lora_alpha=16, lora_dropout=0.1)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A model of every relevant family: tied and untied, and the Qwens, which have more rows than
    tokens.
    """
    folder = tmp_path_factory.mktemp("refinement")
    for kind, tied in {"llama": True, "qwen2": False, "qwen3": True, "mistral": False}.items():
        padded = {"vocab_size": TOKENS + 30} if kind.startswith("qwen") else {}
        tiny_model(kind, tied=tied, initializer_range=0.1, **padded).save_pretrained(folder / kind)
        tiny_tokenizer("smollm2").save_pretrained(folder / kind)
    return folder


def run(recipe, out, **settings):
    return train(recipe, out, EXAMPLES, progress=False, say=lambda text: None, **settings)


def load(folder):
    return Embedder.from_pretrained(folder, dtype="float32", device="cpu")


@pytest.mark.parametrize("kind", ["mixture", pytest.param("pause", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("base", "tuning"),
    [
        ("llama", {}),
        pytest.param("qwen2", {}, marks=pytest.mark.thorough),
        ("qwen3", LORA),
        pytest.param("mistral", LORA, marks=pytest.mark.thorough),
    ],
)
def test_trained_resumed_saved_and_loaded(bases, tmp_path, base, tuning, kind):
    recipe = Recipe(
        **SHARED, **tuning, base=str(bases / base), soft_token_kind=kind, checkpoint_every=2
    )
    final = run(recipe, tmp_path / "whole")
    lines = [
        json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 4 and all(
        np.isfinite(line["loss"]) and line["regularizer"] >= 0 for line in lines
    )
    embedder = load(final)
    assert (
        embedder.soft_tokens.steps == 3
        and embedder.soft_tokens.kind == kind
        and embedder.pooling == "mean"
    )
    vectors = embedder.encode(TEXTS)

    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for name in ("final", "step-000004"):
        shutil.rmtree(tmp_path / "stopped" / name)
    resumed = run(recipe, tmp_path / "stopped", resume=True)
    for file in ["model.safetensors"] + ["pause_tokens.safetensors"] * (kind == "pause"):
        ours = load_file(resumed / file)
        expected = load_file(final / file)
        assert ours.keys() == expected.keys() and all(
            torch.equal(ours[name], expected[name]) for name in expected
        )

    checkpoint = load(tmp_path / "whole" / "step-000004")  # the adapter, if there is one
    np.testing.assert_allclose(checkpoint.encode(TEXTS), vectors, rtol=1e-3, atol=1e-3)
    if kind == "pause":
        first = load_file(tmp_path / "whole" / "step-000002" / "pause_tokens.safetensors")[
            "pause_tokens"
        ]
        assert first.shape == (3, 32) and not torch.equal(first, embedder.decoder.pause_tokens)


def test_adapter_and_merged_weights_give_the_same_vectors(bases, tmp_path):
    recipe = Recipe(**SHARED, **LORA, base=str(bases / "qwen2"), checkpoint_every=4)
    run(recipe, tmp_path / "run")
    adapter = load(tmp_path / "run" / "step-000004")
    assert (tmp_path / "run" / "step-000004" / "adapter_config.json").exists()
    merge_lora(adapter.decoder)
    adapter.save_pretrained(tmp_path / "merged")
    for steps in (1, 3, 7):
        expected = adapter.encode(TEXTS, refine_steps=steps)
        for folder in ("merged", "run/final"):
            np.testing.assert_allclose(
                load(tmp_path / folder).encode(TEXTS, refine_steps=steps),
                expected,
                rtol=1e-3,
                atol=1e-3,
            )


def test_the_command_asks_with_the_instructions_of_training(bases, tmp_path, capsys):
    words = [
        f"{word} {number}" for number in range(8) for word in ("anchor", "ship", "tide", "rope")
    ]
    rows = [{"query": word, "positive": f"a text about {word}"} for word in words]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = "find the passage that answers this question"
    Embedder.from_pretrained(
        bases / "llama",
        dtype="float32",
        device="cpu",
        pooling="mean",
        soft_tokens=SoftTokens(steps=3),
        instructions={"table": {"own": [told]}, "symmetric": []},
    ).save_pretrained(tmp_path / "model")
    embedder = load(tmp_path / "model")
    options = ["--heldout", "12", "--seed", "1", "--dtype", "float32", "--refine-steps", "3"]
    data = str(tmp_path / "own.jsonl")
    assert main(["soft-tokens", str(tmp_path / "model"), "--data", data, *options]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    heldout = split_pairs(data, 12, 1).part("development").retrieval()
    documents = embedder.encode(heldout.documents)
    figures = [
        rank_metrics(heldout.ranks(embedder.encode(heldout.queries, asked), documents))
        for asked in (told, None)
    ]
    assert {name: shown[name] for name in figures[0]} == pytest.approx(figures[0], abs=1e-4)
    assert figures[0] != figures[1]


@pytest.mark.parametrize(
    "batch_tokens",
    [
        1,
        pytest.param(100, marks=pytest.mark.thorough),
        pytest.param(8192, marks=pytest.mark.thorough),
    ],
)
def test_vectors_do_not_depend_on_the_batch(bases, batch_tokens):
    embedder = Embedder.from_pretrained(
        bases / "llama",
        dtype="float32",
        device="cpu",
        pooling="mean",
        soft_tokens=SoftTokens(steps=20),
    )
    texts = [query for query, _, _ in PAIRS] + [positive for _, positive, _ in PAIRS[:24]]
    alone = np.stack(
        [embedder.encode(text, refine_steps=[1, 5, 20], normalize=True) for text in texts]
    )
    together = embedder.encode(
        texts, refine_steps=[1, 5, 20], normalize=True, batch_tokens=batch_tokens
    )
    np.testing.assert_allclose(together, alone, atol=1e-4)


def test_evaluation_sees_soft_tokens_and_dry_run_says_the_first_loss(bases, tmp_path):
    recipe = Recipe(**SHARED, base=str(bases / "llama"), eval_every=4)
    final = run(
        recipe,
        tmp_path / "run",
        evaluate=lambda embedder: {"vectors": embedder.encode(TEXTS, refine_steps=[2, 5]).tolist()},
    )
    evals = [
        json.loads(line) for line in (tmp_path / "run" / "evals.jsonl").read_text().splitlines()
    ]
    np.testing.assert_allclose(
        evals[-1]["vectors"], load(final).encode(TEXTS, refine_steps=[2, 5]), rtol=1e-3, atol=1e-4
    )
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    dry = dry_run(recipe, EXAMPLES, say=lambda text: None)
    assert dry["loss"] == pytest.approx(first["loss"], rel=1e-4)
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert card["recipe"]["refine_steps"] == 3 and card["competitors"].startswith(
        "7 in-batch positives"
    )


def test_rows_without_a_token_are_in_no_soft_token(bases, tmp_path):
    """The values in unused rows change nothing unless a recipe includes these rows; the choice is
    saved.
    """
    out = {
        mask: run(
            Recipe(**SHARED | LORA, mask_unused_rows=mask, base=str(bases / "qwen2")),
            tmp_path / str(mask),
        )
        for mask in (True, False)
    }
    for mask, folder in out.items():
        embedder = load(folder)
        assert (
            embedder.soft_tokens.vocabulary == (TOKENS if mask else 0)
            and len(embedder.decoder.head.weight) == TOKENS + 30
        )
        vectors = embedder.encode(TEXTS)
        with torch.no_grad():
            embedder.decoder.head.weight[TOKENS:] *= 50
            embedder.decoder.causal_lm.get_input_embeddings().weight[TOKENS:] += 3
        assert np.array_equal(vectors, embedder.encode(TEXTS)) == mask
    whole = json.loads((out[True] / "anchor_embedding.json").read_text())
    del whole["soft_tokens"]["vocabulary"]  # as saved before the choice existed: every row
    (out[True] / "anchor_embedding.json").write_text(json.dumps(whole))
    assert load(out[True]).soft_tokens.vocabulary == 0


def test_one_step_trains_without_a_regularizer(bases, tmp_path):
    run(Recipe(**SHARED | {"refine_steps": 1}, base=str(bases / "llama")), tmp_path / "run")
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(line["regularizer"] == 0 and np.isfinite(line["loss"]) for line in lines)


def test_what_cannot_be_run_is_refused_before_training(bases, tmp_path):
    embedder = Embedder.from_pretrained(
        bases / "llama", device="cpu", pooling="mean", soft_tokens=SoftTokens()
    )
    with pytest.raises(InputError, match="no pooling 'mean of soft tokens'"):
        export_embedder(embedder, tmp_path / "export")
    with pytest.raises(InputError, match="`refine_steps` = 0: must be at least 1"):
        Recipe(**SHARED | {"refine_steps": 0}, base="-")
    with pytest.raises(InputError, match="refinement reads causally: leave `attention` out"):
        Recipe(**SHARED, base="-", attention="bidirectional")
    with pytest.raises(InputError, match="`soft_token_temperature` has no effect on pause tokens"):
        Recipe(**SHARED, base="-", soft_token_kind="pause", soft_token_temperature=0.5)
    with pytest.raises(InputError, match=r"`regularizer_floor` = 0\.0: must be above 0"):
        Recipe(**SHARED | {"regularizer_floor": 0.0}, base="-")
    with pytest.raises(
        InputError,
        match=r"with 1000 refinement steps needs .* positions, .* has 1024; "
        "lower max_length or the steps",
    ):
        load(bases / "llama").__class__.from_pretrained(
            bases / "llama", device="cpu", pooling="mean", soft_tokens=SoftTokens(steps=1000)
        )
    with pytest.raises(InputError, match=r"with 1020 refinement steps needs .* has 1024"):
        embedder.encode(TEXTS, refine_steps=1020)
    with pytest.raises(
        InputError, match="40 tokens with 1000 refinement steps needs 1040 positions"
    ):
        run(Recipe(**SHARED | {"refine_steps": 1000}, base=str(bases / "llama")), tmp_path / "long")
    assert not (tmp_path / "long" / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def groups(bases, tmp_path_factory):
    """{(processes, sharding, case): (tensors, losses) of the first rank}."""
    folder = tmp_path_factory.mktemp("groups")
    found = {}
    for processes, shardings in ((1, ("none",)), (2, ("none", "fsdp"))):
        keys = [(processes, sharding, case) for sharding in shardings for case in CASES]
        recipes = {
            key: Recipe(**SHARED | CASES[key[2]], sharding=key[1], base=str(bases / "qwen2"))
            for key in keys
        }
        start(
            folder,
            processes,
            [("-".join(map(str, key)), recipe, False, False) for key, recipe in recipes.items()],
        )
        for key in keys:
            out = folder / "-".join(map(str, key))
            found[key] = (
                load_file(out / "rank0.safetensors"),
                json.loads((out / "rank0.json").read_text()),
            )
    return found


CASES = {
    "full": {"learning_rate": 1e-3}, "full_whole": {"learning_rate": 1e-3, "token_budget": 10_000},
    "lora": {**LORA, "lora_dropout": 0.0, "learning_rate": 1e-3},
    "pause": {**LORA, "lora_dropout": 0.0, "learning_rate": 1e-3, "soft_token_kind": "pause"},
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(groups, case, sharding):
    alone, losses = groups[1, "none", case]
    ours, our_losses = groups[2, sharding, case]
    assert ours.keys() == alone.keys() and our_losses == pytest.approx(losses, rel=1e-3)
    for name, tensor in alone.items():
        if name.startswith("gradient"):
            assert (ours[name] - tensor).abs().max() <= 1e-3 * tensor.abs().max(), name
