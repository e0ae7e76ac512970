"""The command line: every command on a tiny model, and bad input as one clear line with exit code
2.
"""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from notebook_checks import ROOT, find_notebooks

from anchor_embedding import __version__
from anchor_embedding.cli.main import _finished_work, _parser, _spread, main
from anchor_embedding.cli.scoring import compare_command
from anchor_embedding.common.errors import InputError
from anchor_embedding.common.tiny import PROSE, tiny_tokenizer
from anchor_embedding.embed.corpus import Corpus
from anchor_embedding.embed.embedder import Embedder
from anchor_embedding.embed.reading import read_anchors
from anchor_embedding.embed.search import search_corpus
from anchor_embedding.evaluate import comparison
from anchor_embedding.model.loading import load_decoder
from anchor_embedding.model.text import TextTokenizer
from anchor_embedding.study.budget import contestants
from anchor_embedding.train import recipe_files
from anchor_embedding.train.prepare import prepare_tokenizer
from anchor_embedding.train.recipe_files import load_recipe

WORDS = PROSE.split()


def settings(base, pairs, *more):
    """Arguments that make any shipped recipe small."""
    small = [
        f"base={base}",
        f"data={pairs}",
        "batch_size=8",
        "max_length=40",
        "steps=3",
        "dtype=float32",
        *more,
    ]
    return [part for item in small for part in ("--set", item)]


def failure(capsys, *arguments):
    """The one line that a command which must fail prints."""
    assert main([str(a) for a in arguments]) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("anchor: ")]
    assert len(lines) == 1 and "Traceback" not in printed.err and not printed.out
    return lines[0]


def command(*arguments, **options):
    """Runs `anchor …` in a separate process."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", "import sys; from anchor_embedding.cli.main import main; "
                               "sys.exit(main())", *map(str, arguments)],
        capture_output=True, text=True, env=environment, timeout=300, **options,
    )  # fmt: skip


def shown_commands():
    """(file, command) of every `anchor …` in a fenced block of a page."""
    for path in [*find_notebooks(ROOT / "nbs"), *ROOT.glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            for line in re.split(r"\n|&&", block.replace("\\\n", " ")):
                words = shlex.split(line, comments=True)
                if words[:1] == ["anchor"]:
                    yield path.name, words[1:]


def test_commands_that_pages_show_can_be_typed():
    shown = list(shown_commands())
    assert len(shown) > 40 and {"README.md", "3_own_pairs.ipynb"} <= {name for name, _ in shown}
    for name, words in shown:
        try:
            _parser().parse_args(_spread(words))
        except SystemExit as left:
            assert left.code == 0, (name, words)  # --help, --version


def test_questions_are_as_long_as_the_model_reads(base, pairs, tmp_path, capsys):
    """Documents that were cut do not cut the questions, neither in the command nor in Python."""
    model = tmp_path / "run" / "final"
    train = ["train", "stage2", *settings(base, pairs, "instructions=none", "hard_negatives=0")]
    assert main([*map(str, train), "--out", str(tmp_path / "run")]) == 0
    texts = tmp_path / "texts.jsonl"
    rows = [json.loads(line)["positive"] for line in pairs.read_text().splitlines()]
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    vectors = tmp_path / "vectors"
    short = ["--max-length", "12", "--dtype", "float32"]
    assert main(["encode", str(model), "--in", str(texts), "--out", str(vectors), *short]) == 0
    question = " ".join(WORDS[:20])
    capsys.readouterr()
    words = ["search", str(model), str(vectors), question, "--json", "--dtype", "float32"]
    assert main(words) == 0
    hits = json.loads(capsys.readouterr().out)["hits"]
    embedder = Embedder.from_pretrained(model, dtype="float32", device="cpu")
    (found,) = search_corpus(embedder, Corpus(vectors), [question], top=len(hits))
    assert [hit["id"] for hit in hits] == [hit.id for hit in found]
    assert [hit["score"] for hit in hits] == pytest.approx([hit.score for hit in found], abs=1e-5)
    mine = ["mine", "--corpus", vectors, "--model", model, "--data", pairs, "--dtype", "float32"]
    assert "--max-length 12" in failure(capsys, *mine, "--out", tmp_path / "mined.jsonl")


def test_help_is_quick_and_complete():
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = command("--help")
        seconds.append(time.perf_counter() - start)
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("quickstart", "train", "encode", "recipes"))
    assert min(seconds) < 1.5
    assert command("--version").stdout.strip() == f"anchor_embedding {__version__}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["train", "stage2", "--dat", "pairs.jsonl"],
        ["encode", "model"],
        ["quickstart", "--steps", "many"],
    ],
)
def test_usage_errors_exit_2(arguments):
    done = command(*arguments)
    assert done.returncode == 2 and "usage:" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["encode", "", "--in", "texts.txt", "--out", "vectors"],
        ["encode", "model", "--in", "", "--out", "vectors"],
        ["encode", "model", "--in", "texts.txt", "--out", ""],
        ["search", "model", "", "a question"],
        ["eval", "model", "--tasks", "SciFact", "--tasks-dir", ""],
        ["sweep", "", "--tasks", "SciFact"],
        ["compare", ""],
        ["train", "stage1", "--resume", ""],
        ["train", "stage1", "--out", ""],
        ["mine", "", "--data", "pairs.jsonl", "--out", "mined.jsonl"],
    ],
)
def test_an_empty_name_is_not_the_working_folder(arguments, capsys):
    """That of a variable that is not set."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert re.search(r"empty; .* set the variable in it", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("recipe", "terms"),
    [("stage1", {"q2d", "d2q", "loss"}), ("stage2", {"infonce"}), ("baseline", {"infonce"})],
)
def test_dry_run_ends_with_one_json_line(base, pairs, capsys, recipe, terms):
    assert main(["train", recipe, *settings(base, pairs), "--dry-run"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert terms | {"texts", "tokens", "negatives"} <= line.keys()
    assert (
        line["texts"] == 16
        and line["negatives"] == 0
        and all(np.isfinite(line[term]) for term in terms)
    )


def test_alpha_is_the_weight_of_q2d(base, pairs, capsys):
    lines = []
    for alpha in (0.0, 0.3, 1.0):
        main(["train", "stage1", *settings(base, pairs, f"alpha={alpha}"), "--dry-run"])
        lines.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    for alpha, line in zip((0.0, 0.3, 1.0), lines, strict=True):
        assert line["loss"] == pytest.approx(
            alpha * line["q2d"] + (1 - alpha) * line["d2q"], rel=1e-5
        )
    assert lines[0]["q2d"] == pytest.approx(lines[2]["q2d"], rel=1e-6)


def test_both_stages_then_encode(base, pairs, tmp_path, capsys):
    """Stage I, Stage II on its result, vectors of a file: the paper's method on the command line."""
    assert (
        main(
            [
                "train",
                "stage1",
                *settings(base, pairs, "checkpoint_every=2"),
                "--out",
                str(tmp_path / "one"),
            ]
        )
        == 0
    )
    last = json.loads((tmp_path / "one" / "metrics.jsonl").read_text().splitlines()[-1])
    said = capsys.readouterr().err
    assert f"anchor gain: {last['anchor_gain_q2d']:.3f} (Q2D)" in said
    assert (
        main(
            [
                "train",
                "stage2",
                *settings(tmp_path / "one" / "final", pairs),
                "--out",
                str(tmp_path / "two"),
            ]
        )
        == 0
    )
    assert "anchor gain" not in capsys.readouterr().err
    texts = tmp_path / "texts.jsonl"
    texts.write_text(
        '{"text": "what holds the ship"}\n{"text": ""}\n{"text": "' + "word " * 10_000 + '"}\n'
    )
    out = tmp_path / "vectors.npy"
    model = tmp_path / "two" / "final"
    assert (
        main(
            [
                "encode",
                str(tmp_path / "two"),
                "--in",
                str(texts),
                "--out",
                str(out),
                "--dtype",
                "float32",
            ]
        )
        == 0
    )
    said = capsys.readouterr().err
    assert "note: 33% of the first 3 texts are longer than the" in said
    vectors = np.load(out)
    assert vectors.shape == (3, 32) and vectors.dtype == np.float32 and np.isfinite(vectors).all()
    rows = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    np.testing.assert_allclose(
        vectors, Embedder.from_pretrained(model, dtype="float32").encode(rows), rtol=1e-4, atol=1e-5
    )
    assert (
        main(
            [
                "train",
                "stage1",
                *settings(base, pairs, "checkpoint_every=2"),
                "--out",
                str(tmp_path / "one"),
                "--resume",
            ]
        )
        == 0
    )


def test_reading_opens_as_stage_one_did(base, pairs, tmp_path, capsys):
    """Stage II keeps the opening of Stage I, and `anchor read` uses it unless given another."""
    assert (
        main(
            [
                "train",
                "stage1",
                *settings(base, pairs, "decode_opening=none"),
                "--out",
                str(tmp_path / "one"),
            ]
        )
        == 0
    )
    assert (
        main(
            [
                "train",
                "stage2",
                *settings(tmp_path / "one" / "final", pairs),
                "--out",
                str(tmp_path / "two"),
            ]
        )
        == 0
    )
    embedder = Embedder.from_pretrained(tmp_path / "two" / "final", dtype="float32")
    seen = set()
    for words, opening in {(): "none", ("--decode-opening", "encode"): "encode"}.items():
        capsys.readouterr()
        assert (
            main(
                ["read", str(tmp_path / "two"), "what holds the ship", "--dtype", "float32", *words]
            )
            == 0
        )
        expected = str(read_anchors(embedder, "what holds the ship", decode_opening=opening))
        assert capsys.readouterr().out == f"{expected}\n"
        seen.add(expected)
    assert len(seen) == 2


def test_recipes_are_listed_and_shown(capsys):
    assert main(["recipes"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line}
    assert {
        "stage1",
        "stage2",
        "baseline",
        "quickstart",
        "llama-3.1-8b/",
        "stage1_as_released",
    } <= listed
    assert main(["recipes", "mistral-7b/"]) == 0
    assert "Llama" not in capsys.readouterr().out
    assert main(["recipes", "stage1", "--set", "alpha=0.5"]) == 0
    assert "alpha = 0.5" in capsys.readouterr().out


def test_the_nearest_name_is_said(base, pairs, capsys, tmp_path):
    """Misspelled options, also if another is missing; misspelled objectives, benches and paths."""
    for near, command in {
        "unknown: --inn, did you mean `--in`?": ["encode", "m", "--inn", "x", "--out", "y"],
        "did you mean `encode`?": ["bench", "encod"],
        "did you mean `contrastive`?": ["train", "stage2", "--set", "objective=contrastiv"],
        f"did you mean `{pairs}`?": ["check", "--data", f"{pairs}x"],
        "made from the installed packages": ["check", "--data", "docstrings"],
        f"did you mean `{base}`?": ["encode", f"{base}x", "--in", str(pairs), "--out", "vectors"],
    }.items():
        try:
            assert main(command) == 2
        except SystemExit as end:
            assert end.code == 2
        assert near in capsys.readouterr().err


def test_bad_settings_are_named(base, pairs, capsys, tmp_path):
    assert "alpha" in failure(
        capsys, "train", "stage2", *settings(base, pairs, "alpha=0.5"), "--dry-run"
    )
    assert "did you mean `learning_rate`" in failure(
        capsys, "train", "stage1", "--set", "learning_rat=1"
    )
    assert "alpha" in failure(capsys, "train", "stage1", "--set", "alpha=1.5")
    assert "did you mean `stage" in failure(capsys, "train", "stage9")
    assert "nowhere.toml" in failure(capsys, "train", "nowhere.toml")
    (tmp_path / "broken.toml").write_text('name = "x"\nsteps = = 3\n')
    assert "broken.toml" in failure(capsys, "train", tmp_path / "broken.toml")
    assert "pipeline" in failure(capsys, "train", "quickstart", "--dry-run")


def test_too_few_pairs_are_refused_before_the_model_is_loaded(base, pairs, capsys, tmp_path):
    weightless = tmp_path / "weightless"
    shutil.copytree(base, weightless, ignore=shutil.ignore_patterns("*.safetensors"))
    words = ["train", "stage1", "--base", weightless, "--data", pairs, "--out", tmp_path / "run"]
    assert "set batch_size to at most 40" in failure(capsys, *words, "--set", "batch_size=41")
    assert "cannot load model" in failure(capsys, *words, "--set", "batch_size=8")


def test_bad_data_is_named(base, pairs, capsys, tmp_path):
    def dry_run(text, *more):
        path = tmp_path / "bad.jsonl"
        path.write_text(text)
        return failure(capsys, "train", "stage1", *settings(base, path, *more), "--dry-run")

    good = '{"query": "q", "positive": "p"}\n'
    assert "bad.jsonl:2" in dry_run(good + '{"query": "q", "pos\n')
    assert "bad.jsonl:3" in dry_run(good * 2 + '{"query": "q"}\n') and "positive" in dry_run(
        good * 2 + '{"query": "q"}\n'
    )
    assert "bad.jsonl:1" in dry_run('{"query": "", "positive": "p"}\n')
    assert "no rows" in dry_run("")
    message = dry_run(good * 3)
    assert "batch_size" in message and "3" in message
    assert "nowhere" in failure(
        capsys, "train", "stage1", *settings(base, tmp_path / "nowhere.jsonl"), "--dry-run"
    )


def test_a_refused_run_is_in_nobodys_way(base, pairs, capsys, tmp_path):
    """After bad data or bad dimensions, the corrected command runs in the folder that the wrong one
    created.
    """

    def arguments(*more):
        return ["train", "stage2", *settings(base, *more), "--out", str(tmp_path / "run")]

    assert "nowhere" in failure(capsys, *arguments(tmp_path / "nowhere.jsonl"))
    assert "matryoshka" in failure(capsys, *arguments(pairs, "matryoshka=4096"))
    assert main(arguments(pairs)) == 0
    capsys.readouterr()
    assert "already holds a run" in failure(capsys, *arguments(pairs))


def test_resuming_says_from_where_and_names_what_has_changed(base, pairs, capsys, tmp_path):
    def arguments(*more):
        return [
            "train",
            "stage1",
            *settings(base, pairs, *more),
            "--out",
            str(tmp_path / "run"),
            "--resume",
        ]

    assert main(arguments("checkpoint_every=1")) == 0
    assert "there is no checkpoint to resume from; the run starts anew" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run" / "step-000003")
    message = failure(capsys, *arguments("checkpoint_every=1", "learning_rate=1.0", "alpha=0.5"))
    assert "learning_rate was 4e-05 and is now 1.0, alpha was 0.2 and is now 0.5" in message, (
        message
    )
    changes = ["checkpoint_every=0", "keep_checkpoints=1", "token_budget=64"]
    assert main(arguments(*changes, "activation_checkpointing=true")) == 0
    assert "resumes from step 2" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-000002"]


def test_a_run_goes_on_from_its_folder_alone(base, pairs, capsys, tmp_path):
    run = tmp_path / "run"
    given = settings(base, pairs, "checkpoint_every=1", "alpha=0.5")
    assert main(["train", "stage1", *given, "--out", str(run)]) == 0

    def model():
        """The files of the model; the card beside them also tells when the run started again."""
        files = {path.name: path.read_bytes() for path in (run / "final").iterdir()}
        card = json.loads(files.pop("card.json"))
        return files, card["recipe"], card["tokens"]

    whole = model()
    for again in (["--resume", str(run)], [str(run / "recipe.toml"), "--resume"]):
        shutil.rmtree(run / "final")
        shutil.rmtree(run / "step-000003")
        assert main(["train", *again]) == 0
        assert "resumes from step 2" in capsys.readouterr().err
        assert model() == whole
    refused = failure(capsys, "train", "stage2", "--resume", run)
    assert "uses the recipe of that run; leave out stage2" in refused
    assert "name a recipe" in failure(capsys, "train")
    assert "there is no run" in failure(capsys, "train", "--resume", tmp_path / "nowhere")


def test_unknown_lora_targets_are_named_among_known_ones(base, pairs, capsys, tmp_path):
    message = failure(
        capsys,
        "train",
        "stage2",
        *settings(base, pairs, "lora_targets=q_proj,v_porj"),
        "--out",
        tmp_path / "run",
    )
    assert "no layer has a map 'v_porj'" in message


def test_odd_but_usable_data(base, capsys, tmp_path):
    """Training survives a lone surrogate, 10,000 tokens and one-letter texts."""
    path = tmp_path / "odd.jsonl"
    rows = [
        {"query": "lone \ud800 half", "positive": "x"},
        {"query": "long", "positive": "word " * 10_000},
    ] * 4
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["train", "stage1", *settings(base, path), "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"] <= 16 * 40


def test_unknown_models_are_named(pairs, capsys, tmp_path):
    assert "no-such/model" in failure(
        capsys, "train", "stage1", *settings("no-such/model", pairs), "--dry-run"
    )
    (tmp_path / "texts.txt").write_text("one\n")
    assert "no-such/model" in failure(
        capsys,
        "encode",
        "no-such/model",
        "--in",
        tmp_path / "texts.txt",
        "--out",
        tmp_path / "v.npy",
    )
    assert not (tmp_path / "v.npy").exists()


@pytest.mark.thorough
def test_a_corpus_is_encoded_by_several_processes_and_searched(base, tmp_path, capsys):
    texts = [" ".join(WORDS[i : i + 4 + i % 7]) for i in range(40)]
    rows = [json.dumps({"id": f"d{i}", "text": text}) for i, text in enumerate(texts)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows))
    base = str(base)
    given = [base, "--in", str(tmp_path / "corpus.jsonl"), "--dtype", "float32"]
    two = command("encode", *given, "--out", tmp_path / "two", "--nproc", "2", "--shard-size", "9")
    assert two.returncode == 0 and "40 vectors of 32 dimensions" in two.stderr
    assert len([*(tmp_path / "two").glob("shard-*.parquet")]) == 5
    assert main(["encode", *given, "--out", str(tmp_path / "one.npy")]) == 0
    corpus = Corpus(tmp_path / "two")
    together = np.concatenate([vectors for _, vectors in corpus.blocks()])
    np.testing.assert_allclose(together, np.load(tmp_path / "one.npy"), rtol=1e-4, atol=1e-5)

    piped = subprocess.run(
        [
            sys.executable,
            "-m",
            "anchor_embedding",
            "encode",
            base,
            "--in",
            "-",
            "--dtype",
            "float32",
        ]
        + ["--out", tmp_path / "piped", "--columns", ""],
        input=(tmp_path / "corpus.jsonl").read_bytes(),
        capture_output=True,
        check=True,
    )
    assert b"40 vectors" in piped.stderr and Corpus(tmp_path / "piped").columns == ()

    capsys.readouterr()
    words = ["search", base, str(tmp_path / "two"), texts[17], "--dtype", "float32", "--top", "3"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hits"][0]["id"] == "d17" and len(found["hits"]) == 3
    assert found["hits"][0]["score"] == pytest.approx(1, abs=1e-5)
    assert main(words) == 0
    assert "  1.000  d17  " in capsys.readouterr().out
    check_approximate(capsys, words, found, tmp_path / "two")

    assert "already exists" in failure(capsys, "encode", *given, "--out", tmp_path / "one.npy")
    assert "--resume" in failure(capsys, "encode", *given, "--out", tmp_path / "two")
    shared = ("--out", tmp_path / "three", "--nproc", "2", "--device", "cuda:1")
    assert "2 processes would share this one device" in failure(capsys, "encode", *given, *shared)
    stopped = command("encode", *given, "--out", tmp_path / "two", "--nproc", "2")
    assert stopped.returncode == 2 and "Traceback" not in stopped.stderr
    assert (
        main(["encode", *given, "--out", str(tmp_path / "two"), "--shard-size", "9", "--resume"])
        == 0
    )


def test_a_search_asks_as_in_training(base, tmp_path, capsys):
    """The command, with and without an index, asks with the instruction of training or a given one."""
    model = str(tmp_path / "model")
    bare = Embedder.from_pretrained(base, "float32", "cpu")
    trained = {"instructions": "paper", "datasets": ["nq"]}
    Embedder.from_pretrained(base, "float32", "cpu", **trained).save_pretrained(model)
    texts = ["the anchor", "the tide", "a ship in the harbour"]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    corpus = str(tmp_path / "vectors")
    exact = ["--dtype", "float32", "--vector-dtype", "float32"]
    given = ["encode", model, "--in", str(tmp_path / "texts.txt"), "--out", corpus]
    assert main([*given, *exact]) == 0
    assert main(["index", corpus]) == 0
    vectors = bare.encode(texts, normalize=True)
    nq = "Given a question, retrieve Wikipedia passages that answer the question"
    for more, instruction in (([], nq), (["--instruction", "find it"], "find it")):
        best = (vectors @ bare.encode(["anchor"], instruction, normalize=True)[0]).max()
        for how in ([], ["--approximate"]):
            capsys.readouterr()
            words = ["search", model, corpus, "anchor", "--json", "--dtype", "float32"]
            assert main([*words, *more, *how]) == 0
            said = capsys.readouterr()
            hits = json.loads(said.out)["hits"]
            assert hits[0]["score"] == pytest.approx(best, abs=1e-5)
            assert (f"asked with {nq!r}" in said.err) is (not more)


def test_a_search_names_the_instructions_of_which_one_is_to_be_chosen(base, tmp_path, capsys):
    table = {"table": {"a": ["Find it"], "b": ["Find them"]}, "symmetric": []}
    model = str(tmp_path / "model")
    Embedder.from_pretrained(base, "float32", "cpu", instructions=table).save_pretrained(model)
    (tmp_path / "texts.txt").write_text("the anchor\nthe tide\n")
    corpus = str(tmp_path / "vectors")
    assert main(["encode", model, "--in", str(tmp_path / "texts.txt"), "--out", corpus]) == 0
    words = ["search", model, corpus, "anchor"]
    assert "2 instructions ('Find it', 'Find them'" in failure(capsys, *words)
    assert main([*words, "--instruction", ""]) == 0


def check_approximate(capsys, words, exact, folder):
    """An index gives the same hits and says that they are approximate; bad input gives one line."""
    assert "has no index; build it" in failure(capsys, *words, "--approximate")
    assert main(["index", str(folder)]) == 0
    assert f"an index of 40 vectors: {folder / 'index'}" in capsys.readouterr().err
    assert main([*words, "--approximate"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith(" (approximate)") and "  1.000  d17  " in out
    assert main([*words, "--approximate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (exact["approximate"], found["approximate"]) == (False, True)
    for hit, wanted in zip(found["hits"], exact["hits"], strict=True):
        assert hit == wanted | {"score": pytest.approx(wanted["score"], abs=1e-6)}

    assert "add --approximate" in failure(capsys, *words, "--probes", "3")
    assert "probes = 0" in failure(capsys, *words, "--approximate", "--probes", "0")
    assert "top = 0" in failure(capsys, *words, "--approximate", "--top", "0")
    assert "partitions = 41" in failure(capsys, "index", folder, "--partitions", "41")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "lancedb", None)
        for command in (["index", folder], [*words, "--approximate"]):
            assert "pip install lancedb" in failure(capsys, *command)


def test_no_folder_is_ever_replaced(base, pairs, capsys, tmp_path):
    """A mistyped --out does not delete files."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    (tmp_path / "texts.txt").write_text("one\n")
    assert "is not an empty folder" in failure(
        capsys, "encode", base, "--in", tmp_path / "texts.txt", "--out", precious
    )
    assert "is a file" in failure(
        capsys, "quickstart", "--base", base, "--out", tmp_path / "texts.txt"
    )
    assert "not empty" in failure(capsys, "quickstart", "--base", base, "--out", precious)
    with pytest.raises(InputError, match="other files"):
        Embedder.from_pretrained(base).save_pretrained(precious)
    assert [path.name for path in precious.iterdir()] == ["thesis.txt"]


def test_debug_shows_the_traceback():
    done = command("--debug", "train", "nowhere.toml")
    assert done.returncode != 0 and "Traceback" in done.stderr


def test_what_nobody_foresaw_is_one_line_and_exit_code_1(capsys, monkeypatch):
    def fails(*_):
        raise KeyError("a key\nof two lines")

    monkeypatch.setattr(recipe_files, "recipe_table", fails)
    assert main(["recipes"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("anchor: KeyError: ") and message.count("\n") == 1
    assert "`anchor --debug recipes`" in message
    assert main(["--debug", "recipes"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and "This should not happen\n" in shown


def test_settings_are_given_as_people_type_them(capsys):
    one = ["recipes", "smollm2-135m/gircse", "--set", "steps=200", "--set", "batch_size=8"]
    assert main(one) == 0
    shown = capsys.readouterr().out
    assert main(["recipes", "--set", "steps=200", "batch_size=8", "smollm2-135m/gircse"]) == 0
    assert capsys.readouterr().out == shown and "batch_size = 8" in shown


# ---- plan, data, several processes


def test_plan_tells_what_does_not_fit(capsys):
    assert (
        main(["plan", "llama-3.1-8b/stage1", "--nproc", "8", "--gpu", "H100-80GB", "--json"]) == 0
    )
    sharded = json.loads(capsys.readouterr().out)
    assert (
        main(["plan", "llama-3.1-8b/stage1", "--nproc", "8", "--set", "sharding=none", "--json"])
        == 0
    )
    whole = json.loads(capsys.readouterr().out)
    assert sum(sharded["memory"].values()) < 80e9 < sum(whole["memory"].values())
    assert main(["plan", "llama-3.1-8b/stage1", "--nproc", "8"]) == 0
    said = capsys.readouterr()
    assert "fits in 80 GB" in said.out
    assert torch.cuda.is_available() or re.search(r"takes [\d,]+ days to [\d,]+ days", said.err)
    assert "multiple of the 7 processes" in failure(capsys, "plan", "stage1", "--nproc", "7")


def test_plan_takes_the_lengths_of_the_data(base, pairs, capsys):
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    for template, longest in (("auto", 512), ("plain", 512), ("plain", 16)):
        assert (
            main(
                [
                    "plan",
                    "stage1",
                    *settings(base, pairs, f"max_length={longest}", f"template={template}"),
                    "--json",
                ]
            )
            == 0
        )
        found = json.loads(capsys.readouterr().out)
        tokenizer = TextTokenizer(tiny_tokenizer("smollm2"), template, longest)
        expected = [
            sum(map(len, tokenizer([row[side] for row in rows]))) / len(rows)
            for side in ("query", "positive")
        ]
        assert [found["tokens_per_pair"][side] for side in ("query", "document")] == pytest.approx(
            expected
        )
        assert found["lengths"] == "of the data"
    assert main(["plan", "stage1", "--set", f"base={base}", "--set", "data=nowhere.jsonl"]) == 0
    assert "mean tokens (assumed): query 22, document 134" in capsys.readouterr().out


def test_data_check_counts_and_draws(pairs, capsys, tmp_path):
    (tmp_path / "bad.jsonl").write_text(pairs.read_text() + '{"query": "q"}\n')
    assert main(["check", "--data", str(pairs), "--plot", str(tmp_path / "lengths.png")]) == 0
    assert (
        "40" in capsys.readouterr().out
        and (tmp_path / "lengths.png").read_bytes()[:4] == b"\x89PNG"
    )
    assert main(["check", "--data", str(tmp_path / "bad.jsonl")]) == 2
    printed = capsys.readouterr()
    assert "bad.jsonl:41" in printed.out and "1 bad row;" in printed.err
    assert main(["check", "--data", str(pairs), "--plot", str(tmp_path / "lengths.bla")]) == 2
    assert "pictures cannot be written as .bla" in capsys.readouterr().err


def test_a_pipe_is_refused_where_data_are_read_twice(base, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.jsonl")
    words = ["--in", str(tmp_path / "pipe.jsonl"), "--out", str(tmp_path / "vectors")]
    for command in (["check", "--data", words[1]], ["encode", str(base), *words]):
        assert main(command) == 2
        assert "pipe.jsonl: is a pipe or a device" in capsys.readouterr().err


def test_check_counts_tokens_as_max_length_does(base, pairs, capsys, tmp_path):
    assert main(["check", "--data", str(pairs), "--base", str(base), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    (figures,) = found["datasets"].values()
    tokenizer = TextTokenizer(tiny_tokenizer("smollm2"))
    for side in ("query", "positive"):
        lengths = [len(text) for text in tokenizer([row[side] for row in rows])]
        assert figures["lengths"][side]["max"] == max(lengths)
        assert figures["lengths"][side]["median"] in lengths
    assert found["unit"] == "tokens"
    # of a base that was trained here, with its own template and EOS, which training takes too
    plain = TextTokenizer(tiny_tokenizer("smollm2"), "plain", eos_token="<|endoftext|>")
    Embedder(load_decoder(base), plain).save_pretrained(tmp_path / "own")
    assert main(["check", "--data", str(pairs), "--base", str(tmp_path / "own"), "--json"]) == 0
    (own,) = json.loads(capsys.readouterr().out)["datasets"].values()
    recipe = load_recipe("baseline", [f"base={tmp_path / 'own'}"])
    read = prepare_tokenizer(recipe, str(tmp_path / "own"))([row["query"] for row in rows])
    assert own["lengths"]["query"]["max"] == max(map(len, read))
    assert own["lengths"]["query"]["max"] < figures["lengths"]["query"]["max"]
    assert main(["check", "--data", str(pairs), "--base", "no/such-base"]) == 2
    assert "no/such-base" in capsys.readouterr().err


def test_wrong_numbers_of_processes_are_named_before_anything_starts(base, pairs, capsys, tmp_path):
    def refused(*more):
        return failure(
            capsys, "train", "stage1", *settings(base, pairs), "--out", tmp_path / "run", *more
        )

    assert "nproc is 0" in refused("--nproc", "0")
    assert "batch_size 8 must be a multiple of the 3 processes" in refused("--nproc", "3")
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_tasks_are_scored_during_training_the_same_on_any_number_of_processes(
    base, pairs, capsys, tmp_path
):
    folder = tmp_path / "tasks" / "sts" / "Pairs"
    folder.mkdir(parents=True)
    rows = [
        {
            "sentence1": " ".join(WORDS[i : i + 6]),
            "sentence2": " ".join(WORDS[i + i % 5 : i + 6]),
            "score": float(i % 5),
        }
        for i in range(21)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "train",
        "stage1",
        *settings(base, pairs, "eval_every=2"),
        "--eval-tasks",
        "Pairs",
        "--tasks-dir",
        str(tmp_path / "tasks"),
    ]
    one = tmp_path / "one"
    two = tmp_path / "two"
    capsys.readouterr()
    assert main([*words, "--out", str(one)]) == 0
    done = command(*words, "--out", two, "--nproc", "2")
    assert done.returncode == 0, done.stderr[-4000:]
    for said in (capsys.readouterr().err, done.stderr):
        assert said.count("note: tasks are scored with texts of up to 512 tokens") == 1

    def read(run):
        return [json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines()]

    assert [(line["step"], line["task"], line["metric"]) for line in read(one)] == [
        (step, "Pairs", "cosine_spearman") for step in (0, 2, 3)
    ]
    # equal hits may swap ranks
    assert [line["score"] for line in read(two)] == pytest.approx(
        [line["score"] for line in read(one)], abs=0.02
    )
    assert "--set eval_every=STEPS" in failure(
        capsys, "train", "stage1", *settings(base, pairs), "--eval-tasks", "Pairs"
    )
    assert "Pairs" in failure(
        capsys, *[word.replace("Pairs", "Pears") for word in words], "--out", tmp_path / "three"
    )


def environment_of_launchers():
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
    }


@pytest.mark.thorough
@pytest.mark.parametrize(("launcher", "processes"), [
    (["-m", "anchor_embedding", "train", "--nproc=2"], 2),
    (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "anchor_embedding", "train"], 2),
    (["-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no",
      # it starts several processes only on accelerators
      "--dynamo_backend=no", "-m", "anchor_embedding", "train"], 1),
], ids=["nproc", "torchrun", "accelerate"])  # fmt: skip
def test_every_launcher_trains(launcher, processes, base, pairs, tmp_path):
    arguments = [*launcher, "stage1", *settings(base, pairs), "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=environment_of_launchers(),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert (
        card["processes"] == processes
        and len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    )
    Embedder.from_pretrained(tmp_path / "run" / "final", device="cpu")


@pytest.mark.thorough
def test_a_launcher_may_not_change_what_is_computed(base, pairs, tmp_path):
    launcher = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=fp16",
                "--dynamo_backend=no", "-m", "anchor_embedding", "train"]  # fmt: skip
    arguments = [*launcher, "stage1", *settings(base, pairs), "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=environment_of_launchers(),
        timeout=300,
    )
    assert (
        done.returncode
        and "ACCELERATE_MIXED_PRECISION=fp16" in done.stderr
        and "set dtype in the recipe" in done.stderr
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name",
    [
        "GRADIENT_ACCUMULATION_STEPS",
        "MIXED_PRECISION",
        "DYNAMO_BACKEND",
        "USE_FSDP",
        "USE_DEEPSPEED",
        "USE_MEGATRON_LM",
    ],
)
def test_environment_that_would_change_what_is_computed_is_refused(
    capsys, monkeypatch, base, pairs, tmp_path, name
):
    value = {
        "GRADIENT_ACCUMULATION_STEPS": "4",
        "MIXED_PRECISION": "fp16",
        "DYNAMO_BACKEND": "INDUCTOR",
    }.get(name, "true")
    monkeypatch.setenv(f"ACCELERATE_{name}", value)
    error = failure(capsys, "train", "stage1", *settings(base, pairs), "--out", tmp_path / "run")
    assert f"the environment has ACCELERATE_{name}={value}" in error and "unset it" in error


def test_a_shorter_run_keeps_the_share_of_its_warm_up(capsys, base, pairs):
    for given, steps in (
        ("stage2", 60),
        ("llama-3.2-1b/stage2", 60),
        ("llama-3.2-1b/stage2_as_released", 300),
    ):
        assert main(["recipes", given, "--set", "steps=200"]) == 0
        assert f"\nwarmup_steps = {steps}\n" in capsys.readouterr().out
    assert main(["train", "stage1", *settings(base, pairs, "steps=20"), "--dry-run"]) == 0
    assert (
        "steps = 20 instead of 2000, and the warm-up keeps its share: warmup_steps = 3 instead "
        "of 300" in capsys.readouterr().err
    )
    assert "would never fall" in failure(
        capsys,
        "train",
        "stage1",
        *settings(base, pairs, "steps=20", "warmup_steps=20"),
        "--dry-run",
    )


@pytest.mark.parametrize(("chosen", "quiet"), [(None, True), ("3", False)])
@pytest.mark.thorough
def test_the_profiler_is_quiet_unless_it_is_asked_to_speak(chosen, quiet):
    code = """
import os, sys
from anchor_embedding.cli.main import main
assert "torch" not in sys.modules, "the level is read when torch is imported"
main(["recipes", "quickstart"])
print(os.environ["KINETO_LOG_LEVEL"])
import torch
with torch.profiler.profile():
    torch.ones(2).sum()
"""
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    environment |= {"KINETO_LOG_LEVEL": chosen} if chosen else {}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == (chosen or "6"), done.stderr
    assert done.stderr.strip() == "" or not quiet, done.stderr


def test_a_reader_that_closes_early_ends_a_command_quietly():
    code = "import sys; from anchor_embedding.cli.main import main; sys.exit(main(['recipes']))"
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141


def printed_commands(name):
    """The commands `anchor NAME …` that pages and README print, as lists of words."""
    texts = [(ROOT / "README.md").read_text("utf-8")]
    for path in find_notebooks(ROOT / "nbs"):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        texts += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    joined = [text.replace("\\\n", " ") for text in texts]
    lines = [line.partition("#")[0] for text in joined for line in text.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith(f"anchor {name} ")]


def test_every_printed_tournament_can_begin():
    commands = printed_commands("tournament")
    assert len(commands) > 1
    for words in commands:
        args = _parser().parse_args(_spread(words))
        assert contestants(args.recipes, args.set), words


# ---- options that were accepted without an effect, and messages with the wrong remedy


def test_resume_goes_on_in_the_run(base, pairs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "stage1"]) == 0
    (tmp_path / "recipe.toml").write_text(capsys.readouterr().out)
    small = settings(base, pairs, "name=mine", "steps=2", "checkpoint_every=1")
    words = ["train", "recipe.toml", *small]
    assert main(words) == main([*words, "--resume"]) == 0
    # not in the folder of a recipe that happens to be called recipe.toml
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.toml", "runs"]
    card = json.loads((tmp_path / "runs" / "mine" / "card.json").read_text())
    assert len(card["starts"]) == 2
    assert main(["train", "--resume", "runs/mine", "--out", str(tmp_path / "runs" / "mine")]) == 0
    capsys.readouterr()

    def refused(*more):
        return failure(capsys, "train", "--resume", *more)

    assert "leave out --out other" in refused("runs/mine", "--out", "other")
    assert "there is no run runs/mime; did you mean `runs/mine`" in refused("runs/mime")
    assert "name its run: --resume runs/mine" in refused("runs/mine/final")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train quickstart --eval-tasks X", "need a recipe of one stage"),
        ("train stage1 --dry-run --nproc 2", "leave out --resume"),
        ("train stage1 --data  --dry-run", "`data` = '': must be given"),
        ("recipes --set steps=3", "name it"),
        ("recipes smollm2-135m/ --set steps=3", "name it"),
        ("recipes stage1 --schema", "leave out stage1"),
        ("sweep nonsense", "there is no run folder nonsense"),
        ("tournament --recipes baseline --amount 2 --heldout 0 --data PAIRS", "at least 2"),
        ("ceiling BASE --data PAIRS --pairs -1", "pairs = -1: give at least two"),
        ("ceiling BASE --data PAIRS --out FOLDER", "name a file"),
        ("aa-check --runs-dir PAIRS", "is a file; name a folder for the runs"),
        ("soft-tokens BASE --plot s.xyz", "cannot be written as .xyz"),
        ("soft-tokens BASE --out FOLDER", "name a file"),
    ],
)
def test_what_would_have_no_effect_is_refused(base, pairs, capsys, tmp_path, words, message):
    places = {"PAIRS": str(pairs), "BASE": str(base), "FOLDER": str(tmp_path)}
    given = [places.get(word, word) for word in words.split(" ")]
    if given[0] in ("train", "tournament"):
        given += ["--set", f"base={base}"]
    assert message in failure(capsys, *given)


def test_settings_with_digits_can_follow_set():
    spread = _spread(["quickstart", "--set", "steps=3", "stage1.steps=2", "beta2=0.9", "x"])
    assert spread[1:] == ["--set", "steps=3", "--set", "stage1.steps=2", "--set", "beta2=0.9", "x"]


def test_a_home_folder_is_found_behind_an_equals_sign():
    words = ["export", "model", "--out=~/there"]
    assert _parser().parse_args(words).out == Path.home() / "there"


def test_standard_input_is_not_a_table(base, tmp_path):
    words = ("encode", base, "--in", "-", "--out", tmp_path / "vectors")
    for text, message in (("id,text\na,hello\n", "begins like a CSV file"), ("", "nothing on")):
        done = command(*words, input=text)
        assert done.returncode == 2 and message in done.stderr
    assert not (tmp_path / "vectors").exists()


def test_lines_on_standard_input_that_follow_blank_ones_are_read_as_in_a_file(
    base, tmp_path, monkeypatch
):
    for name, lines in (("jsonl", ['{"text": "a b"}', '{"text": "c d"}']), ("txt", ["a b"])):
        content = ("\n" + "\n".join(lines) + "\n").encode()
        (tmp_path / f"corpus.{name}").write_bytes(content)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        texts = {}
        for source in ("-", str(tmp_path / f"corpus.{name}")):
            out = tmp_path / f"{name}-{len(texts)}"
            assert main(["encode", str(base), "--in", source, "--out", str(out)]) == 0
            (shard,) = out.glob("shard-*.parquet")
            texts[source] = pd.read_parquet(shard)["text"].tolist()
        piped, named = texts.values()
        assert piped == named and piped[-1] == ("c d" if name == "jsonl" else "a b")


def test_a_process_encodes_alone_unless_it_is_told_which_of_several_it_is(
    base, tmp_path, monkeypatch, capsys
):
    (tmp_path / "texts.txt").write_text("one\ntwo\n")
    words = ["encode", str(base), "--in", str(tmp_path / "texts.txt"), "--out"]
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    for more in ([], ["--nproc", "1"]):
        out = tmp_path / f"alone{len(more)}.npy"
        assert main([*words, str(out), *more]) == 0
        assert len(np.load(out)) == 2 and "2 vectors" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "not a .npy file" in failure(capsys, *words, tmp_path / "some.npy")
    monkeypatch.delenv("RANK")
    assert "RANK is not set" in failure(capsys, *words, tmp_path / "some")
    assert not (tmp_path / "some").exists()


def test_output_that_cannot_be_written_is_no_bug(tmp_path):
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-m", "anchor_embedding"]
    with open("/dev/full", "w") as full:
        done = subprocess.run([*words, "recipes"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "anchor: the output cannot be written: No space left on device\n"
    (tmp_path / "ü.jsonl").write_text('{"query": "a", "positive": "b"}\n')
    done = subprocess.run(
        [*words, "check", "--data", "ü.jsonl"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and r"\xfc.jsonl" in done.stdout


@pytest.mark.parametrize(
    ("words", "work"),
    [
        ("compare scores.json --out file/table.md", "evaluate.comparison.compare"),
        ("check --data pairs --plot file/lengths.png", "data.check.check_data"),
    ],
)
def test_a_place_is_looked_at_before_the_work(words, work, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    monkeypatch.setattr(f"anchor_embedding.{work}", None)
    assert "cannot write file/" in failure(capsys, *words.split())


def test_a_comparison_is_kept_whoever_reads_it(tmp_path, monkeypatch, capsys):
    """`anchor compare --out FILE | head` writes the file; one that cannot be written is shown."""
    made = SimpleNamespace(save=lambda path: path.write_text("table"))
    monkeypatch.setattr(comparison, "compare", lambda *arguments: made)
    args = SimpleNamespace(scores=[], paper="a", out=tmp_path / "table.md")
    with monkeypatch.context() as patch, pytest.raises(BrokenPipeError):
        patch.setattr("builtins.print", Mock(side_effect=BrokenPipeError))
        compare_command(args)
    assert args.out.read_text() == "table"
    made.save = Mock(side_effect=InputError("no room"))
    with pytest.raises(InputError):
        compare_command(args)
    assert capsys.readouterr().out == f"{made}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("encode m --in a --out v.npy", "v.npy was not written"),
        ("encode m --in a --out v", "finished work is in v"),
        ("export m --out e", "e was not written"),
        ("aa-check --runs-dir aa --out aa.json", "finished work is in aa"),
        ("plan stage1", "nothing was written"),
        ("train stage1", "finished work is in the run folder"),
    ],
)
def test_an_interrupted_command_says_what_is_there(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = _parser().parse_args(words.split())
    if message.startswith("finished work is in"):
        before = message if "the run folder" in message else "nothing was written"
        assert _finished_work(args) == before
        Path(message.split()[-1]).mkdir()
    assert _finished_work(args) == message


def test_a_full_gpu_is_told_with_its_remedy(base, pairs, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    texts = tmp_path / "texts.txt"
    texts.write_text("a ship\n")
    monkeypatch.setattr(Embedder, "encode", full)
    assert main(["encode", str(base), "--in", str(texts), "--out", str(tmp_path / "v.npy")]) == 2
    said = capsys.readouterr().err
    assert "memory is full (CUDA out of memory." in said and "lower --batch-tokens" in said
    assert "should not happen" not in said
