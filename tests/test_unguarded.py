"""Faults that once passed every test: each has its own test here."""

import copy
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM

import anchor_embedding.data.store as store_module
import anchor_embedding.train.prepare as prepare_module
import anchor_embedding.train.stage as stage
from anchor_embedding.cli.main import main
from anchor_embedding.common.errors import InputError, Stopped
from anchor_embedding.common.tiny import tiny_model, tiny_tokenizer
from anchor_embedding.data.batches import Instructions, tokenize_batch
from anchor_embedding.data.examples import Example
from anchor_embedding.data.store import open_examples
from anchor_embedding.embed.embedder import Embedder
from anchor_embedding.embed.export import export_embedder
from anchor_embedding.embed.mining import MiningSettings, choose_negatives
from anchor_embedding.embed.shared import SharedEmbedder
from anchor_embedding.model.loading import add_lora, load_decoder
from anchor_embedding.model.soft_tokens import SoftTokens
from anchor_embedding.model.text import TextTokenizer, make_template
from anchor_embedding.objectives.distilled_reconstruction import DistilledReconstruction
from anchor_embedding.objectives.objective import code_of, find_objective, name_of
from anchor_embedding.objectives.reconstruction import Reconstruction
from anchor_embedding.objectives.released import ReleasedReconstruction
from anchor_embedding.study.architectures import tiny_random_model
from anchor_embedding.study.pipeline import run_pipeline
from anchor_embedding.train.loop import learning_rate
from anchor_embedding.train.prepare import (
    base_shape,
    make_data,
    prepare_embedder,
    prepare_tokenizer,
)
from anchor_embedding.train.recipe import Recipe
from anchor_embedding.train.recipe_files import load_recipe
from anchor_embedding.train.runs import RunFolder, read_log
from anchor_embedding.train.stage import open_run, train


def quiet(text):
    pass


def small(base, pairs, **settings):
    shared = {"name": "small", "objective": "reconstruction", "base": str(base), "steps": 3}
    shared |= {"data": str(pairs), "batch_size": 8, "warmup_steps": 1, "max_length": 40}
    return Recipe(**(shared | {"dtype": "float32", "learning_rate": 3e-3} | settings))


def test_the_optimizer_is_adamw_with_the_settings_of_the_recipe(
    base, examples, pairs, tmp_path, monkeypatch
):
    """Weight decay, both betas and epsilon, compared with the formula of Loshchilov and Hutter."""
    rate, beta1, beta2, epsilon, decay = 3e-3, 0.6, 0.7, 1e-3, 0.3
    recipe = small(base, pairs, beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=decay)
    recipe = recipe.replace(schedule_steps=10**9)
    seen = []
    real = torch.optim.AdamW.step

    def step(self, *arguments, **settings):
        (group,) = self.param_groups
        seen.append([(p.detach().double(), p.grad.double()) for p in group["params"]])
        return real(self, *arguments, **settings)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train(recipe, tmp_path / "run", examples, progress=False, say=quiet)
    weights = [weight.clone() for weight, _ in seen[0]]
    first = [torch.zeros_like(weight) for weight in weights]
    second = [torch.zeros_like(weight) for weight in weights]
    for number, state in enumerate(seen, start=1):
        for i, (weight, gradient) in enumerate(state):
            assert torch.allclose(weight, weights[i], atol=1e-6)
            first[i] = beta1 * first[i] + (1 - beta1) * gradient
            second[i] = beta2 * second[i] + (1 - beta2) * gradient**2
            mean = first[i] / (1 - beta1**number)
            spread = (second[i] / (1 - beta2**number)).sqrt()
            weights[i] = weights[i] * (1 - rate * decay) - rate * mean / (spread + epsilon)
    saved = load_file(tmp_path / "run" / "final" / "model.safetensors")
    ends = sorted(weight.sum().item() for weight in saved.values())
    assert ends == pytest.approx(sorted(weight.sum().item() for weight in weights), abs=1e-3)


@pytest.mark.thorough
def test_every_step_and_every_process_has_noise_of_its_own(base, pairs, tmp_path):
    """The state of the random generator in each of three steps of two processes: six different
    states.
    """
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os\n"
        "if 'RANK' in os.environ:\n"
        "    import torch\n"
        "    real = torch.optim.AdamW.step\n"
        "    def step(self, *arguments, **settings):\n"
        "        with open(os.environ['SEEDS'] + os.environ['RANK'], 'a') as file:\n"
        "            print(torch.initial_seed(), file=file)\n"
        "        return real(self, *arguments, **settings)\n"
        "    torch.optim.AdamW.step = step\n"
    )
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "SEEDS": str(tmp_path / "seeds-")}
    small(base, pairs, input_dropout=0.5).save(tmp_path / "wanted.toml")
    command = [sys.executable, "-m", "anchor_embedding", "train", str(tmp_path / "wanted.toml")]
    subprocess.run(
        [*command, "--out", str(tmp_path / "run"), "--nproc", "2"],
        env=os.environ | environment,
        check=True,
        capture_output=True,
    )
    seeds = [(tmp_path / f"seeds-{rank}").read_text().split() for rank in range(2)]
    assert [len(own) for own in seeds] == [3, 3] and len({*seeds[0], *seeds[1]}) == 6


def test_changed_data_are_refused_on_resume(base, pairs, tmp_path, capsys):
    copy = tmp_path / "pairs.jsonl"
    copy.write_text(pairs.read_text())
    small(base, copy, checkpoint_every=1).save(tmp_path / "wanted.toml")
    words = ["train", str(tmp_path / "wanted.toml"), "--out", str(tmp_path / "run"), "--resume"]
    assert main(words) == 0
    for name in ("final", "step-000003"):
        shutil.rmtree(tmp_path / "run" / name)
    rows = [json.loads(line) for line in copy.read_text().splitlines()]
    rows[7]["positive"] += " and more"
    copy.write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    # a run that is refused leaves its folder as it was, also what would be pruned or cut
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    assert main([*words, "--set", "keep_checkpoints=1"]) == 2
    assert "are not those this run began with" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before
    assert main([*words, "--set", f"data={tmp_path / 'gone.jsonl'}"]) == 2
    assert {path: path.read_bytes() for path in before} == before
    assert (tmp_path / "run" / "step-000002").is_dir() and not (tmp_path / "run" / "final").exists()


def test_a_run_without_a_checkpoint_keeps_its_log_when_it_cannot_go_on(base, pairs, tmp_path):
    copy = tmp_path / "pairs.jsonl"
    copy.write_text(pairs.read_text())
    recipe = small(base, copy)

    def killed(line):
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        train(recipe, tmp_path / "run", progress=False, say=quiet, on_step=killed)
    log = (tmp_path / "run" / "metrics.jsonl").read_text()
    copy.unlink()
    with pytest.raises(InputError, match="no such file"):
        train(recipe.replace(alpha=0.7), tmp_path / "run", resume=True, progress=False, say=quiet)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == log
    assert (tmp_path / "run" / "recipe.toml").read_text() == recipe.to_toml()


def test_what_is_asked_for_and_cannot_be_done_is_said(base, pairs, tmp_path):
    """Evaluations without anything that evaluates, and a base that was read with another
    template.
    """
    said = []
    first = train(
        small(base, pairs, eval_every=1, template="plain"), tmp_path / "one", say=said.append
    )
    assert any("eval_every = 1, but there is nothing to evaluate" in line for line in said)
    assert not any(line.startswith("note: the base was trained") for line in said)
    second = small(first, pairs, template="released", max_length=60)
    train(second, tmp_path / "two", say=said.append)
    assert any("trained with template = 'plain', and this recipe has 'released'" in s for s in said)


def test_texts_that_are_cut_are_said(base, examples, pairs, tmp_path):
    """A text of just `max_length` tokens is whole; an instruction counts too."""
    tokenizer = prepare_tokenizer(small(base, pairs, max_length=200), str(base))
    lengths = sorted(len(text) for text in tokenizer([e.query for e in examples]))
    for length, share in ((lengths[-1], 0), (lengths[-1] - 1, 1)):
        recipe = small(base, pairs, max_length=length)
        data = make_data(recipe, prepare_tokenizer(recipe, str(base)), examples)
        assert (data.cut()[0] > 0) == bool(share)
    said = []
    train(small(base, pairs, max_length=lengths[0] + 2), tmp_path / "run", say=said.append)
    assert any(re.search(r"cuts \d+% of the queries and 100% of the positives", s) for s in said)


def test_what_is_said_of_a_mixture_is_of_the_pairs_trained_on(base, pairs):
    """The first batch holds one dataset only, and one that is left out counts nowhere."""
    rows = [Example("who", "holds " * 60, (), "long")] * 300
    rows += [Example("who", "it", ("a sail",), "short")] * 300
    recipe = small(base, pairs, batch_size=256, max_length=24)
    tokenizer = prepare_tokenizer(recipe, str(base))
    for sampling, said in (((), (0, 0.5, 600, 1)), (("short=0",), (0, 1, 300, 0))):
        data = make_data(recipe.replace(sampling=sampling), tokenizer, rows)
        found = (*data.cut(), data.source["pairs"], data.most_negatives)
        assert found == pytest.approx(said)
    assert data.source["left_out"] == {"short": 300}


def resume(recipe, folder, refused):
    "Resume a run; with a part named, it must be refused for that part."
    if refused:
        with pytest.raises(InputError, match=f"{refused} = .*not what this run began with"):
            train(recipe, folder, resume=True, progress=False, say=quiet)
    else:
        train(recipe, folder, resume=True, progress=False, say=quiet)
    assert (folder / "final").exists() == (not refused)


def change_base(folder, part):
    """Change a part of a model under the same path."""
    if part == "weights":
        tiny_model("llama", seed=1).save_pretrained(folder)
        return
    path = folder / part
    content = json.loads(path.read_text()) if path.suffix == ".json" else None
    if part == "config.json":
        content["rms_norm_eps"] = 0.01
    if part == "tokenizer.json":
        vocabulary = content["model"]["vocab"]
        *_, one, other = vocabulary
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    text = json.dumps(content) if content else path.read_text() + "{# changed #}"
    path.write_text(text)


PARTS = ["weights", "tokenizer.json", "chat_template.jinja", "config.json"]


@pytest.mark.parametrize("changed", [*PARTS, "instructions", ""])
def test_a_changed_base_or_instruction_is_refused_on_resume(base, pairs, tmp_path, capsys, changed):
    own = shutil.copytree(base, tmp_path / "base")
    instructions = tmp_path / "instructions.csv"
    instructions.write_text("dataset,instruction\npairs,Find it\n")
    settings = {"objective": "contrastive", "tuning": "lora", "instructions": str(instructions)}
    recipe = small(own, pairs, checkpoint_every=1, **settings)
    train(recipe, tmp_path / "run", progress=False, say=quiet)
    for name in ("final", "step-000003"):
        shutil.rmtree(tmp_path / "run" / name)
    shutil.copytree(own, tmp_path / "copy")  # other times, the same weights
    shutil.rmtree(own)
    shutil.copytree(tmp_path / "copy", own, copy_function=shutil.copyfile)
    if changed in PARTS:
        change_base(own, changed)
    if changed == "instructions":
        instructions.write_text("dataset,instruction\npairs,Find something else\n")
    refused = "base" if changed in PARTS else changed
    resume(recipe, tmp_path / "run", refused)


@pytest.mark.parametrize("changed", ["weights", "tokenizer_config.json", ""])
def test_a_changed_teacher_is_refused_on_resume(base, pairs, tmp_path, changed):
    own = shutil.copytree(base, tmp_path / "teacher")
    settings = {"objective": "distilled_reconstruction", "teacher": str(own)}
    recipe = small(base, pairs, checkpoint_every=1, **settings)
    train(recipe, tmp_path / "run", progress=False, say=quiet)
    for name in ("final", "step-000003"):
        shutil.rmtree(tmp_path / "run" / name)
    if changed == "weights":
        change_base(own, changed)
    elif changed:
        (own / changed).write_text((own / changed).read_text() + "\n")
    resume(recipe, tmp_path / "run", "teacher" if changed else "")


@pytest.mark.parametrize("objective", ["language_model", "distilled_reconstruction"])
def test_pairs_beyond_the_context_are_refused_before_the_first_step(pairs, tmp_path, objective):
    tiny_model("llama", max_position_embeddings=64).save_pretrained(tmp_path / "base")
    tiny_tokenizer("smollm2").save_pretrained(tmp_path / "base")
    settings = {"objective": objective}
    if objective == "distilled_reconstruction":
        settings["teacher"] = str(tmp_path / "base")
    recipe = small(tmp_path / "base", pairs, **settings)
    with pytest.raises(
        InputError, match=r"a pair of texts of max_length = 40 .* has 64; lower max_length"
    ):
        train(recipe, tmp_path / "run", progress=False, say=quiet)
    assert not (tmp_path / "run").exists()
    train(recipe.replace(max_length=24), tmp_path / "run", progress=False, say=quiet)


def test_an_instruction_that_is_too_long_is_refused_before_the_first_step(base, tmp_path):
    rows = [
        {"query": f"query {n}", "positive": f"document {n}", "dataset": name}
        for name, number in {"often": 80, "seldom": 8}.items()
        for n in range(number)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    long = "a very long instruction " * 12
    for table in (f"often,Find it\nseldom,{long}\n", f"often,Find it\noften,{long}\n"):
        (tmp_path / "instructions.csv").write_text("dataset,instruction\n" + table)
        settings = {"objective": "contrastive", "instructions": str(tmp_path / "instructions.csv")}
        recipe = small(base, tmp_path / "pairs.jsonl", **settings)
        with pytest.raises(InputError, match="no room after this instruction"):
            train(recipe, tmp_path / "run", progress=False, say=quiet)
        assert not (tmp_path / "run").exists()


def test_the_anchor_gain_is_measured_without_dropout(base, examples, pairs, tmp_path, monkeypatch):
    modes = []
    real = Reconstruction.watch

    def watched(self, decoder, *arguments, **settings):
        modes.extend(module.training for module in decoder.modules())
        return real(self, decoder, *arguments, **settings)

    monkeypatch.setattr(Reconstruction, "watch", watched)
    trained = []
    step = Reconstruction.step

    def stepped(self, model, *arguments):
        trained.append(model.training)
        return step(self, model, *arguments)

    monkeypatch.setattr(Reconstruction, "step", stepped)
    recipe = small(base, pairs, input_dropout=0.5, anchor_gain_every=1)
    train(recipe, tmp_path / "run", examples, progress=False, say=quiet)
    assert modes and not any(modes)
    assert trained == [True] * 3


def batches_of_rows(examples):
    "Batches of 1024, 512, 1024, … rows."
    examples = iter(examples)
    for size in itertools.cycle((1024, 512)):
        if not (rows := [*itertools.islice(examples, size)]):
            return
        yield rows


def test_rows_of_a_store_are_those_of_the_file_wherever_they_are(tmp_path, monkeypatch):
    """More rows than one batch of the file holds, requested in any order."""
    monkeypatch.setenv("ANCHOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store_module, "_chunks", batches_of_rows)
    wanted = [Example(f"query {i}", f"positive {i}", (f"no {i}",), "many") for i in range(5000)]
    with open(tmp_path / "many.jsonl", "w") as file:
        for pair in wanted:
            row = {"query": pair.query, "positive": pair.positive, "negative": pair.negatives[0]}
            file.write(json.dumps(row) + "\n")
    store = open_examples(tmp_path / "many.jsonl", say=quiet)
    places = [4999, 0, 1023, 1024, 1025, 1535, 1536, 1537, 2559, 2560, 3333, 1]
    assert store.take(places) == [wanted[place] for place in places]
    assert list(store) == wanted


@pytest.mark.parametrize("balanced", [False, True])
def test_processes_share_a_batch(base, examples, pairs, balanced):
    """Every pair of a batch belongs to one process, and to no other."""
    recipe = small(base, pairs)
    data = make_data(recipe, prepare_tokenizer(recipe, recipe.base), examples)
    data = replace(data, balanced=balanced)
    for world in (1, 2, 4):
        shares = [[*data.places(1, rank, world)] for rank in range(world)]
        assert sorted(itertools.chain(*shares)) == list(range(8))
        assert {len(share) for share in shares} == {8 // world}


def test_the_rate_and_the_gradient_of_every_step_are_its_own(base, examples, pairs, tmp_path):
    """A schedule of warm-up and decay; no gradient is carried over to the next step."""
    recipe = small(base, pairs, steps=4, warmup_steps=2, max_grad_norm=1e-3)
    run = open_run(recipe, tmp_path / "run", examples, say=quiet)
    rates = []
    real = run.optimizer.step

    def step(*arguments, **settings):
        (group,) = run.optimizer.param_groups
        rates.append(group["lr"])
        norm = torch.nn.utils.get_total_norm([p.grad for p in group["params"]])
        assert norm.item() == pytest.approx(1e-3, rel=1e-3)
        return real(*arguments, **settings)

    run.optimizer.step = step
    try:
        for number in range(4):
            run.step(number)
            assert all(p.grad is None for p in run.decoder.parameters())
    finally:
        run.close()
    assert rates == pytest.approx([1.5e-3, 3e-3, 3e-3, 1.5e-3])


@pytest.mark.parametrize("saved_every", [2, 3])
def test_evaluations_come_as_often_as_asked_for_and_at_the_end(
    base, examples, pairs, tmp_path, saved_every
):
    """Also in a resumed run, whether or not it goes on from an evaluated step."""
    recipe = small(base, pairs, steps=5, eval_every=2, checkpoint_every=saved_every)

    def run(**settings):
        train(
            recipe,
            tmp_path / "run",
            examples,
            evaluate=lambda embedder: {"figure": 1.0},
            progress=False,
            say=quiet,
            **settings,
        )
        lines = (tmp_path / "run" / "evals.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    assert run() == [0, 2, 4, 5]
    for name in ("final", "step-000005"):
        shutil.rmtree(tmp_path / "run" / name)
    assert run(resume=True) == [0, 2, 4, 5]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_loss_that_is_no_number_ends_the_run(base, examples, pairs, tmp_path, value):
    run = open_run(small(base, pairs), tmp_path / "run", examples, say=quiet)
    before = [weight.clone() for weight in run.decoder.parameters()]
    real = run.objective
    run.objective = SimpleNamespace(step=lambda *given: real.step(*given) | {"loss": value})
    try:
        with pytest.raises(InputError, match=rf"the loss is {value} at step 1: start again"):
            run.step(0)
    finally:
        run.close()
    assert all(map(torch.equal, before, run.decoder.parameters()))


def test_adapters_begin_as_the_seed_says(base, pairs):
    """The same seed draws the same matrices, another seed others."""

    def first_matrix(seed):
        recipe = small(base, pairs, tuning="lora", seed=seed)
        embedder, _ = prepare_embedder(recipe, torch.device("cpu"), say=quiet)
        named = embedder.decoder.named_parameters()
        return next(weight.detach() for name, weight in named if "lora_A" in name)

    assert torch.equal(first_matrix(1), first_matrix(1))
    assert not torch.equal(first_matrix(1), first_matrix(2))


def test_random_negatives_are_other_ones_for_every_query():
    """Among equal scores each query has its own choice, which depends only on its key."""
    settings = MiningSettings(num_negatives=3, sampling="random", relative_margin=None)
    scores = np.tile(np.linspace(0.9, 0.1, 50, dtype=np.float32), (20, 1))
    ones = np.ones(20, np.float32)
    chosen, taken = choose_negatives(settings, scores, ones, range(20))
    assert taken.all() and len({tuple(row) for row in chosen.tolist()}) > 15
    again, _ = choose_negatives(settings, scores[:1], ones[:1], [7])
    assert again.tolist() == chosen[7:8].tolist()


def test_the_best_documents_are_passed_over_as_asked():
    settings = MiningSettings(num_negatives=2, range_min=3, range_max=5, relative_margin=None)
    scores = np.linspace(0.9, 0.1, 10, dtype=np.float32)[None]
    chosen, taken = choose_negatives(settings, scores, np.ones(1, np.float32), [0])
    assert chosen.tolist() == [[3, 4]] and taken.all()


def test_the_rate_rises_to_its_top_and_falls_until_the_end_of_the_schedule(base, pairs):
    recipe = small(base, pairs, steps=6, warmup_steps=2, learning_rate=8e-3, schedule_steps=10)
    rates = [learning_rate(recipe, step) for step in range(6)]
    assert rates == pytest.approx([4e-3, 8e-3, 8e-3, 7e-3, 6e-3, 5e-3])


def test_texts_beyond_the_context_are_refused_in_training_and_when_they_come(
    base, examples, pairs, tmp_path
):
    """The base has 1,024 positions, whether the length is given or set later."""
    message = "needs 1025 positions, .* has 1024; lower max_length"
    with pytest.raises(InputError, match=f"max_length = 1025 {message}"):
        train(small(base, pairs, max_length=1025), tmp_path / "run", examples, say=quiet)
    with pytest.raises(InputError, match=f"max_length = 1025 {message}"):
        Embedder.from_pretrained(base, max_length=1025)
    embedder = Embedder.from_pretrained(base, max_length=1024)
    embedder.tokenizer.max_length = 1025
    assert embedder.encode(["a few words"]).shape == (1, embedder.dimension)
    with pytest.raises(InputError, match=f"a text {message}"):
        embedder.encode(["a few words", "word " * 2000])


@pytest.mark.parametrize("template", ["auto", "chat"])
def test_a_stage_after_a_stage_reads_texts_as_on_the_base(examples, pairs, tmp_path, template):
    """A template has its own EOS: that of the first stage's template is not taken for another."""
    base = tmp_path / "base"
    tiny_model("gemma").save_pretrained(base)
    tiny_tokenizer("gemma").save_pretrained(base)
    first = small(base, pairs, template="plain")
    trained = train(first, tmp_path / "run", examples, progress=False, say=quiet)
    second = small(base, pairs, objective="contrastive", template=template)
    on_base, after = (prepare_tokenizer(second, str(folder)).template for folder in (base, trained))
    assert after.style == ("plain" if template == "auto" else "chat")
    if template == "chat":
        assert after == on_base and after.eos_id != prepare_tokenizer(first, str(base)).eos_id


def test_pause_tokens_are_passed_on_to_the_next_stage(base, examples, pairs, tmp_path):
    settings = {"objective": "refinement", "pooling": "mean", "soft_token_kind": "pause"}
    recipe = small(base, pairs, **settings, refine_steps=3, learning_rate=5e-2)
    trained = train(recipe, tmp_path / "run", examples, progress=False, say=quiet)
    kept = load_file(trained / "pause_tokens.safetensors")["pause_tokens"]
    said = []
    for steps in (3, 2):
        following = recipe.replace(base=str(trained), refine_steps=steps)
        embedder, _ = prepare_embedder(following, torch.device("cpu"), say=said.append)
        assert torch.equal(embedder.decoder.pause_tokens, kept) == (steps == 3)
    assert (
        len([line for line in said if "the 3 pause tokens of the base are not used" in line]) == 1
    )


def test_a_run_that_goes_on_with_other_products_says_so(
    base, examples, pairs, tmp_path, monkeypatch
):
    """With dtype = "auto", a run may be resumed on a processor without bfloat16."""
    recipe = small(base, pairs, dtype="auto", checkpoint_every=1)
    said = []
    for dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(prepare_module, "choose_dtype", lambda *_, own=dtype: (own, "a test"))
        resumed = (tmp_path / "run").exists()
        train(recipe, tmp_path / "run", examples, progress=False, say=said.append, resume=resumed)
        if not resumed:
            shutil.rmtree(tmp_path / "run" / "final")
            shutil.rmtree(tmp_path / "run" / "step-000003")
    starts = json.loads((tmp_path / "run" / "card.json").read_text())["starts"]
    assert [start["dtype"] for start in starts] == ["torch.bfloat16", "torch.float32"]
    assert [line for line in said if "in bfloat16 before step 3" in line]


# ---- settings and models at the edge


def saved_base(folder, model, kind="smollm2"):
    model.save_pretrained(folder)
    tiny_tokenizer(kind).save_pretrained(folder)
    return str(folder)


def some_pairs(number, dataset="a"):
    return [Example(f"who holds {i}", f"the anchor {i} holds", (), dataset) for i in range(number)]


def batch_of(tokenizer, examples):
    return tokenize_batch(examples, tokenizer, Instructions.none(), hard_negatives=0)


def test_a_teacher_needs_a_head_and_may_have_more_rows(tmp_path):
    tokenizer = TextTokenizer(tiny_tokenizer("smollm2"), "plain", max_length=64)
    student = load_decoder(saved_base(tmp_path / "student", tiny_model("llama")))
    headless = saved_base(tmp_path / "headless", tiny_model("llama", tied=False, seed=1).model)
    without = DistilledReconstruction(teacher=headless, teacher_weight=1.0).prepared(tokenizer)
    with pytest.raises(InputError, match=r"`teacher` = .*headless.* needs a vocabulary head"):
        without.check_context(student, tokenizer)
    rows = len(student.head.weight)
    model = tiny_model("llama", seed=1)
    padded = copy.deepcopy(model)
    padded.resize_token_embeddings(rows + 28, mean_resizing=False)
    losses = []
    for name, teacher in (("same", model), ("padded", padded)):
        folder = saved_base(tmp_path / name, teacher)
        objective = DistilledReconstruction(teacher=folder, teacher_weight=1.0).prepared(tokenizer)
        objective.check_context(student, tokenizer)
        losses.append(objective.loss(student, batch_of(tokenizer, some_pairs(4)))["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("weight", [1.0, 0.1, 0.01])
def test_targets_that_weigh_little_are_a_mean_all_the_same(weight, tmp_path):
    tokenizer = TextTokenizer(tiny_tokenizer("smollm2"), "plain", max_length=64)
    decoder = load_decoder(saved_base(tmp_path / "base", tiny_model("llama")))
    batch = batch_of(tokenizer, [Example("yes", "no")] * 4)
    plain = Reconstruction().prepared(tokenizer)
    weighted = replace(plain, first_tokens=8, first_weight=weight)
    expected = plain.loss(decoder, batch)
    assert weighted.loss(decoder, batch) == pytest.approx(expected, rel=1e-5)
    assert weighted.part_loss(decoder, batch).item() == pytest.approx(expected["loss"], rel=1e-5)


def test_a_target_with_its_eos_must_fit_the_context(tmp_path):
    base = saved_base(tmp_path / "base", tiny_model("llama", max_position_embeddings=40), "qwen2")
    pairs = [Example("who", "the anchor holds the ship " * 12)] * 8
    settings = {"template": "plain", "max_length": 40, "token_budget": 100_000}
    fits = small(base, "given", **settings)
    train(fits, tmp_path / "fits", pairs, progress=False, say=quiet)
    with pytest.raises(InputError, match=r"decoding a text of max_length = 40 needs 41 positions"):
        recipe = fits.replace(predict_eos=True)
        train(recipe, tmp_path / "longer", pairs, progress=False, say=quiet)


def test_a_gain_is_measured_with_any_micro_batch(tmp_path):
    base = saved_base(tmp_path / "base", tiny_model("llama"), "llama3")
    recipe = small(base, "given", objective="released", template="released", micro_batch_size=4)
    recipe = recipe.replace(anchor_gain_every=1, steps=2)
    train(recipe, tmp_path / "run", some_pairs(21), progress=False, say=quiet)
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    lines = [json.loads(line) for line in open(tmp_path / "run" / "metrics.jsonl")]
    assert card["watched"].startswith("5 pairs") and "anchor_gain_q2d" in lines[0]


def test_released_names_a_missing_eos_and_takes_an_empty_text(tmp_path):
    hub = tiny_tokenizer("smollm2")
    tokenizer = TextTokenizer(hub, "plain", max_length=64)
    decoder = load_decoder(saved_base(tmp_path / "base", tiny_model("llama")))
    objective = ReleasedReconstruction(micro_batch_size=1).prepared(tokenizer)
    terms = objective.loss(decoder, batch_of(tokenizer, [Example("", ""), *some_pairs(1)]))
    assert np.isfinite([*terms.values()]).all()
    named = TextTokenizer(hub, "plain", 64, hub.eos_token)
    named.tokenizer.eos_token = None
    with pytest.raises(InputError, match="pads with the EOS of the tokenizer"):
        ReleasedReconstruction().prepared(named)


def test_tokens_beyond_the_rows_of_the_model_are_refused(tmp_path):
    base = tmp_path / "base"
    tiny_model("llama").save_pretrained(base)
    hub = tiny_tokenizer("smollm2")
    hub.add_special_tokens({"pad_token": "<|pad|>"})  # never made from a text
    hub.save_pretrained(base)
    recipe = small(base, "given")
    train(recipe, tmp_path / "padding", some_pairs(8), progress=False, say=quiet)
    hub.add_tokens(["anchorholds"])
    hub.save_pretrained(base)
    with pytest.raises(InputError, match=r"the token 'anchorholds' with id 421.* has 420 embed"):
        train(recipe, tmp_path / "more", some_pairs(8), progress=False, say=quiet)


@pytest.mark.parametrize("failing, step", [(2, 2), (3, 3)])
@pytest.mark.parametrize("error", [InputError("the disk"), RuntimeError("the disk")])
def test_a_failed_evaluation_costs_no_training(
    base, examples, pairs, tmp_path, error, failing, step
):
    """Its run goes on from the step after which it failed, and ends like an undisturbed one."""
    recipe = small(base, pairs, steps=3, eval_every=2)
    calls = []

    def evaluate(embedder):
        calls.append(embedder)
        if len(calls) == failing:  # the first call is before all steps
            raise error
        return {"figure": 1.0}

    def run(name, evaluate, resume=False):
        folder = tmp_path / name
        settings = {"progress": False, "say": quiet, "evaluate": evaluate, "resume": resume}
        return train(recipe, folder, examples, **settings)

    with pytest.raises(type(error), match="the disk") as caught:
        run("failed", evaluate)
    checkpoint = tmp_path / "failed" / f"step-{step:06}"
    assert checkpoint.is_dir()
    told = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert f"the steps so far are in {checkpoint}" in told
    run("failed", evaluate, resume=True)
    assert len(calls) == 4  # the one that failed is repeated, no other
    run("whole", lambda embedder: {"figure": 1.0})
    logs = [read_log(tmp_path / name / "evals.jsonl") for name in ("failed", "whole")]
    assert logs[0] == logs[1] == [{"step": done, "figure": 1.0} for done in (0, 2, 3)]
    weights = [
        load_file(tmp_path / name / "final" / "model.safetensors") for name in ("failed", "whole")
    ]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[1])


def test_a_checkpoint_is_saved_before_the_evaluation_of_its_step(base, examples, pairs, tmp_path):
    """With several processes, a failed evaluation cannot save what was not saved before it."""
    recipe = small(base, pairs, steps=2, eval_every=1, checkpoint_every=1)
    seen = []

    def evaluate(embedder):
        seen.append(sorted(path.name for path in (tmp_path / "run").glob("step-*")))
        return {"figure": 1.0}

    train(recipe, tmp_path / "run", examples, progress=False, say=quiet, evaluate=evaluate)
    assert [names[-1:] for names in seen] == [[], ["step-000001"], ["step-000002"]]


def test_a_signal_stops_a_run_before_an_evaluation_and_not_in_its_last_save(
    base, examples, pairs, tmp_path, monkeypatch, request
):
    recipe = small(base, pairs, steps=3, eval_every=2)
    evaluated = []
    settings = {"progress": False, "say": quiet}
    settings["evaluate"] = lambda embedder: evaluated.append(1) or {"figure": 1.0}

    def terminate(row):
        if row["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="after step 2 of 3"):
        train(recipe, tmp_path / "run", examples, on_step=terminate, **settings)
    assert len(evaluated) == 1  # before all steps
    save_merged = SharedEmbedder.save_merged

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        save_merged(*arguments)

    def killed(*_):
        raise AssertionError("the signal would have ended the process")

    before = signal.signal(signal.SIGTERM, killed)
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, before))
    monkeypatch.setattr(SharedEmbedder, "save_merged", interrupted)
    final = train(recipe, tmp_path / "run", examples, resume=True, **settings)
    assert (final / "model.safetensors").exists()
    lines = read_log(tmp_path / "run" / "evals.jsonl")
    assert [line["step"] for line in lines] == [0, 2, 3]


def test_a_signal_breaks_off_an_evaluation(base, examples, pairs, tmp_path):
    """What was trained is saved at once, and the evaluation is made when the run goes on."""
    recipe = small(base, pairs, steps=3, eval_every=2)
    evaluated = []

    def evaluate(embedder):
        evaluated.append("begun")
        if len(evaluated) == 2:  # after step 2
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            except Exception:
                pytest.fail("an evaluation may catch its errors, and must not catch this")
        return {"figure": 1.0}

    settings = {"progress": False, "say": quiet, "evaluate": evaluate}
    with pytest.raises(Stopped, match=r"stopped by SIGTERM after step 2 of 3: .*step-000002"):
        train(recipe, tmp_path / "run", examples, **settings)
    train(recipe, tmp_path / "run", examples, resume=True, **settings)
    lines = read_log(tmp_path / "run" / "evals.jsonl")
    assert [line["step"] for line in lines] == [0, 2, 3] and len(evaluated) == 4


def test_an_evaluation_leaves_dropout_on(base, examples, pairs, tmp_path):
    """Also when it ends in `eval()`; and the caller's random numbers are not touched."""
    recipe = small(base, pairs, objective="contrastive", tuning="lora", lora_dropout=0.5, steps=4)
    losses = {}
    drawn = []
    for name in ("kept", "switched"):

        def evaluate(embedder, name=name):
            if name == "switched":
                embedder.decoder.eval()
            return {"figure": 1.0}

        one = recipe.replace(eval_every=1)
        torch.manual_seed(7)
        train(one, tmp_path / name, examples, progress=False, say=quiet, evaluate=evaluate)
        drawn.append(torch.rand(1).item())
        losses[name] = [row["loss"] for row in read_log(tmp_path / name / "metrics.jsonl")]
    assert losses["kept"] == losses["switched"]
    torch.manual_seed(7)
    assert drawn == [torch.rand(1).item()] * 2


def test_pairs_of_another_kind_are_refused(base, examples, pairs, tmp_path):
    recipe = small(base, pairs, steps=2)
    rows = [{"query": "a", "positive": "b"}] * 9
    for given, words in {
        (Example("a", "b", "nq"),): "the negatives of number 0 are the text 'nq'",
        (*examples, "a text"): "the pairs are of the type str",
        tuple(map(tuple, [rows[0].values()])): "the pairs are of the type tuple",
    }.items():
        for call in (train, lambda recipe, out, given: stage.dry_run(recipe, given, quiet)):
            with pytest.raises(InputError, match=words):
                call(recipe, tmp_path / "run", [*given])
    with pytest.raises(InputError, match="the pairs are a generator, which can be read only once"):
        train(recipe, tmp_path / "run", (example for example in examples))
    with pytest.raises(InputError, match="the held-out pairs are of the type dict"):
        train(recipe, tmp_path / "run", examples, heldout=rows)
    with pytest.raises(InputError, match="a Pipeline where a Recipe of one stage is needed"):
        stage.dry_run(load_recipe("quickstart"), examples)
    for given, words in (("stage1", "where a pipeline is needed"), (Path("no.toml"), "no.toml")):
        with pytest.raises(InputError, match=words):
            run_pipeline(given, tmp_path / "pipeline")
    assert not (tmp_path / "run").exists() and not (tmp_path / "pipeline").exists()


def test_the_code_of_an_objective_is_that_which_was_imported(tmp_path, monkeypatch):
    """An edited file changes nothing before it is imported again."""
    file = tmp_path / "edited.py"
    code = """
from dataclasses import dataclass
from typing import ClassVar
from anchor_embedding.objectives.objective import Objective

@dataclass(frozen=True, kw_only=True)
class Mine(Objective):
    name: ClassVar[str] = "contrastive"
    figure: float = {}
"""
    file.write_text(code.format(1.0))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    kind = find_objective("edited:Mine")
    assert name_of(kind) == "edited:Mine" and (before := code_of(kind))
    file.write_text(code.format(2.0))
    assert code_of(kind) == before
    monkeypatch.delitem(sys.modules, "edited")
    importlib.invalidate_caches()
    assert code_of(find_objective("edited:Mine")) not in (before, None)
    monkeypatch.delitem(sys.modules, "edited")


def test_an_evaluation_is_logged_whole_or_not_at_all(base, examples, pairs, tmp_path):
    recipe = small(base, pairs, steps=2, eval_every=1)
    with pytest.raises(InputError, match="figures by name"):
        run = {"evaluate": lambda embedder: [{"figure": 1.0}, None], "progress": False}
        train(recipe, tmp_path / "run", examples, say=quiet, **run)
    assert read_log(tmp_path / "run" / "evals.jsonl") == []


@pytest.mark.parametrize("returned", [None, [None], 0.5, {"step": 1, "figure": 2.0}])
def test_an_evaluation_returns_figures_by_name(base, examples, pairs, tmp_path, returned):
    recipe = small(base, pairs, eval_every=1)
    with pytest.raises(InputError, match=r"`evaluate` returned .* figures by name, without `step`"):
        train(
            recipe,
            tmp_path / "run",
            examples,
            evaluate=lambda embedder: returned,
            progress=False,
            say=quiet,
        )


PHI = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
    "{{ '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
OLMO = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
)


def test_a_chat_template_that_ends_the_talk_with_eos_is_a_chat_template():
    hub = tiny_tokenizer("llama3")
    hub.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|end|>"]})
    hub.chat_template = PHI
    hub.name_or_path = "x/phi-instruct"
    template = make_template(hub, "auto")
    assert template.style == "chat" and hub.decode([template.eos_id]) == "<|end|>"
    assert "<|user|>" in hub.decode(template.header)
    hub = tiny_tokenizer("smollm2")
    hub.bos_token = hub.eos_token
    hub.chat_template = OLMO
    hub.name_or_path = "x/olmo-instruct"
    with pytest.raises(InputError, match=r"with eos_token=…, or template 'plain'"):
        make_template(hub, "chat")
    assert make_template(hub, "auto") == make_template(hub, "plain")


def test_two_instructions_alternate_within_their_dataset(base):
    """Whatever other datasets stand between the rows."""
    examples = [Example(f"q{i}", f"d{i}", (), ("nq", "allnli")[i % 2]) for i in range(32)]
    recipe = small(base, "given", objective="contrastive", instructions="paper", batch_size=16)
    recipe = recipe.replace(max_length=200)
    data = make_data(recipe, prepare_tokenizer(recipe, recipe.base), examples)
    step = next(step for step in range(2) if data.plan.dataset(step) == "allnli")
    queries = [data.tokenizer.tokenizer.decode(text.ids) for text in data.batch(step).queries]
    similar = sum("semantically similar" in query for query in queries)
    assert (similar, len(queries)) == (8, 16)


def test_a_base_that_was_read_in_another_way_is_noted(base, pairs, tmp_path):
    read = small(base, pairs, objective="mntp", attention="bidirectional", pooling="mean")
    train(read, tmp_path / "mntp", progress=False, say=quiet)
    said = []
    following = small(tmp_path / "mntp" / "final", pairs, objective="contrastive")
    train(following, tmp_path / "next", progress=False, say=said.append)
    notes = [line for line in said if line.startswith("note: the base was trained with")]
    assert [note.split(" = ")[0].rsplit(" ", 1)[1] for note in notes] == ["attention", "pooling"]
    table = tmp_path / "asked.csv"
    table.write_text("dataset,instruction,symmetric\npairs,Find it.,0\n")
    saved = Embedder.from_pretrained(base, soft_tokens=SoftTokens(steps=1), pooling="mean")
    saved.instructions = "paper"
    saved.save_pretrained(tmp_path / "soft")
    read = small(tmp_path / "soft", pairs, objective="contrastive", pooling="mean")
    asked = read.replace(instructions=str(table), prompt="{instruction} | {text}")
    for recipe, wanted in ((read, ["soft"]), (asked, ["prompt", "soft"])):
        said.clear()
        prepare_embedder(recipe, torch.device("cpu"), say=said.append)
        notes = [line.split("trained with ")[1] for line in said if line.startswith("note: ")]
        assert [note.split()[0] for note in notes] == wanted


def test_the_memory_of_an_adapter_is_that_of_its_base(base, pairs, tmp_path):
    tuned = Embedder.from_pretrained(base)
    add_lora(tuned.decoder, 2, 4, 0.0, ("q_proj",))
    tuned.save_pretrained(tmp_path / "run" / "final")
    for place in (tmp_path / "run" / "final", tmp_path / "run"):
        assert base_shape(small(place, pairs)) == base_shape(small(base, pairs))


def test_processes_with_other_weights_or_evaluations_are_refused(tmp_path, monkeypatch):
    """Machines with their own run folders may hold different files of the same checkpoint, and one
    may have been told to evaluate while the others were not.
    """
    seen = []

    def gather(everyone, own):
        everyone[:] = [seen[0] if seen else own, own]
        seen.append(own)

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)

    def check(machine, weight, evaluate=None, **of_card):
        folder = RunFolder(tmp_path / machine)
        folder.checkpoint(2).mkdir(parents=True, exist_ok=True)
        save_file({"x": torch.tensor([weight])}, folder.checkpoint(2) / "model.safetensors")
        card = dict.fromkeys(("watched_pairs", "base_digest", "base_files_digest", "instructions"))
        card["dtype"] = "torch.float32"
        card |= of_card
        objective = SimpleNamespace(models=dict)
        stage.check_same_inputs(
            SimpleNamespace(
                world=2,
                first=2,
                folder=folder,
                card=card,
                data=SimpleNamespace(source={"fingerprint": "the same"}),
                recipe=SimpleNamespace(objective=objective),
            ),
            evaluate,
        )

    check("first", 1.0)
    check("second", 1.0)
    for key in ("base_digest", "base_files_digest"):
        seen.clear()
        check("first", 1.0, **{key: "one"})
        with pytest.raises(InputError, match="have different files or names under 'base'"):
            check("second", 1.0, **{key: "other"})
    seen.clear()
    check("first", 1.0)
    with pytest.raises(InputError, match="choose different dtypes on their devices; name one with"):
        check("second", 1.0, dtype="torch.bfloat16")
    with pytest.raises(InputError, match="have different weights in the same checkpoint"):
        check("second", 2.0)
    with pytest.raises(InputError, match="do not evaluate the same"):
        check("second", 1.0, evaluate=lambda model: {})


def test_a_run_that_has_a_model_has_its_totals(base, pairs, tmp_path):
    """A process may die while it saves the final model: what was spent is known by then. Lines that
    are missing in the log are said when the run goes on.
    """
    recipe = small(base, pairs, checkpoint_every=2)
    said = []
    with (
        mock.patch.object(SharedEmbedder, "save_merged", side_effect=RuntimeError("killed")),
        pytest.raises(RuntimeError, match="killed"),
    ):
        train(recipe, tmp_path / "run", progress=False, say=said.append)
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert card["tokens"] > 0 and not (tmp_path / "run" / "final").exists()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    train(recipe, tmp_path / "run", resume=True, progress=False, say=said.append)
    assert (tmp_path / "run" / "final").exists()
    assert any(f"only 0 of the {recipe.steps} steps before are logged" in line for line in said)


def test_an_adapter_names_its_base_by_the_whole_path(base, pairs, tmp_path, monkeypatch):
    """A relative path would name another model when the checkpoint is read from another folder."""
    monkeypatch.chdir(base.parent)
    recipe = small(base.name, pairs, tuning="lora", checkpoint_every=3)
    train(recipe, tmp_path / "run", progress=False, say=quiet)
    adapter = tmp_path / "run" / "step-000003" / "adapter_config.json"
    assert json.loads(adapter.read_text())["base_model_name_or_path"] == str(base)
    monkeypatch.chdir(tmp_path)
    Embedder.from_pretrained(tmp_path / "run" / "step-000003")


def test_an_adapter_keeps_its_base_when_the_working_folder_changes(base, tmp_path, monkeypatch):
    """Between loading and saving; also on top of another adapter."""

    def base_of_adapter(below, folder):
        monkeypatch.chdir(below.parent)
        embedder = Embedder.from_pretrained(below.name, "float32", "cpu")
        add_lora(embedder.decoder, rank=2, alpha=4)
        monkeypatch.chdir(tmp_path)
        embedder.save_pretrained(folder)
        return json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]

    first = tmp_path / "adapters" / "first"
    second = tmp_path / "adapters" / "second"
    assert base_of_adapter(base, first) == str(base)
    assert base_of_adapter(first, second) == str(first)
    Embedder.from_pretrained(second, "float32", "cpu")


def test_a_finished_run_is_finished_again_and_a_model_is_saved_over_itself(base, pairs, tmp_path):
    """A job that a cluster starts again finds its work done. The card in `final` is the run's."""
    recipe = small(base, pairs, checkpoint_every=3)
    train(recipe, tmp_path / "run", progress=False, say=quiet)
    final = train(recipe, tmp_path / "run", resume=True, progress=False, say=quiet)
    assert (final / "card.json").read_text() == (tmp_path / "run" / "card.json").read_text()
    Embedder.from_pretrained(final).save_pretrained(final)
    assert not (final / "card.json").exists()  # what is there now may be another model


def test_an_adapter_of_a_model_without_a_name_has_no_base(base, pairs, tmp_path, monkeypatch):
    """The working folder is not its base."""
    monkeypatch.chdir(base)
    embedder, _ = prepare_embedder(
        small(base, pairs, tuning="lora"), torch.device("cpu"), say=quiet
    )
    embedder.decoder.causal_lm.name_or_path = ""
    for adapter in embedder.decoder.model.peft_config.values():
        adapter.base_model_name_or_path = None
    embedder.save_pretrained(tmp_path / "adapter")
    kept = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert not kept["base_model_name_or_path"]


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_dropout_of_the_base_is_noted(base, pairs, tmp_path, share):
    shutil.copytree(base, tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_dropout": share}))
    said = []
    recipe = small(tmp_path / "base", pairs, objective="contrastive")
    prepare_embedder(recipe, torch.device("cpu"), say=said.append)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base").train()
    with torch.no_grad():
        first, second = (model(torch.arange(12)[None]).logits for _ in range(2))
    noted = [line for line in said if "attention_dropout = 0.1" in line and "config.json" in line]
    assert bool(noted) == (not torch.equal(first, second)) == bool(share)


def test_what_does_not_reach_experts_is_noted(pairs, tmp_path):
    """Also that a router draws lots in training, and that PEFT takes experts for other maps."""

    def prepared(model_type, **settings):
        causal_lm = tiny_random_model(model_type)
        tokenizer = tiny_tokenizer("smollm2")
        causal_lm.resize_token_embeddings(len(tokenizer))
        causal_lm.save_pretrained(tmp_path / model_type)
        tokenizer.save_pretrained(tmp_path / model_type)
        recipe = small(tmp_path / model_type, pairs, objective="contrastive", **settings)
        said = []
        prepare_embedder(recipe, torch.device("cpu"), say=said.append)
        return "\n".join(said)

    said = prepared("mixtral", dtype="bfloat16")
    assert "the experts of this mixture are multiplied in float32" in said and "draws" not in said
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = {"tuning": "lora", "lora_targets": attention, "dtype": "float32"}
    assert "the experts of this mixture get no adapters" in prepared("glm4_moe", **lora)
    assert "of this mixture" not in prepared("llama", **lora)
    assert "draws random numbers in training, so" in prepared("phimoe", max_length=128)
    for dropout in (0.0, 0.1):
        with pytest.raises(InputError, match="name only maps that no expert has, such as q_proj"):
            prepared("glm4_moe", tuning="lora", lora_dropout=dropout)
    with pytest.raises(InputError, match="not support activation checkpointing; set activation"):
        prepared("jetmoe", activation_checkpointing=True)


def test_a_stage_can_begin_after_the_batches_of_another(base):
    examples = [Example(f"q{i}", f"d{i}", (), ("one", "other")[i % 2]) for i in range(64)]
    recipe = small(base, "given", objective="contrastive", batch_size=8)
    first, second = (
        make_data(one, prepare_tokenizer(one, one.base), examples)
        for one in (recipe, recipe.replace(skip_batches=3))
    )
    for step in range(7):  # a pass has eight batches
        texts = [text.ids for text in second.batch(step).queries]
        assert texts == [text.ids for text in first.batch(step + 3).queries]
    with pytest.raises(InputError, match="skip_batches"):
        recipe.replace(skip_batches=-1)


def test_full_tuning_of_an_adapter_trains_all_weights(base, pairs, tmp_path):
    lora = small(base, pairs, objective="contrastive", tuning="lora", checkpoint_every=2)
    train(lora, tmp_path / "lora", progress=False, say=quiet)
    *_, adapter = sorted((tmp_path / "lora").glob("step-*"))
    full = small(adapter, pairs, objective="contrastive")
    final = train(full, tmp_path / "full", progress=False, say=quiet)
    card = json.loads((tmp_path / "full" / "card.json").read_text())
    assert card["trained_parameters"] == card["parameters"]
    before = load_decoder(adapter).causal_lm.state_dict()
    after = load_decoder(final).causal_lm.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before if "layers" in name)


def test_a_model_of_a_short_context_is_read_and_exported_within_it(tmp_path):
    tiny_model("llama", max_position_embeddings=64).save_pretrained(tmp_path / "base")
    tiny_tokenizer("llama3").save_pretrained(tmp_path / "base")
    text = "anchor ship " * 120
    export_embedder(tmp_path / "base", tmp_path / "exported")
    theirs = SentenceTransformer(str(tmp_path / "exported"), device="cpu")
    ours = Embedder.from_pretrained(tmp_path / "base", "float32", "cpu")
    assert theirs.max_seq_length == ours.tokenizer.max_length == 64
    np.testing.assert_allclose(theirs.encode([text]), ours.encode([text]), atol=1e-4)
    longer = Embedder.from_pretrained(tmp_path / "base", "float32", "cpu", max_length=64)
    longer.tokenizer.max_length = 65
    with pytest.raises(InputError, match="max_length = 65 needs 65 positions"):
        export_embedder(longer, tmp_path / "longer")
    assert not (tmp_path / "longer").exists()
