"""An exported model gives the same ids and the same vectors in other programs, for every tokenizer,
padding and attention.
"""

import gzip
import itertools
import json
import os
import shutil
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import mteb
import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig, AutoTokenizer

from anchor_embedding.cli.main import main
from anchor_embedding.common.errors import InputError
from anchor_embedding.common.provenance import find_cards, weights_digest
from anchor_embedding.common.tiny import KINDS, PROSE, tiny_model, tiny_tokenizer
from anchor_embedding.data.docstrings import docstring_pairs
from anchor_embedding.embed.embedder import QUERY_INSTRUCTION, Embedder
from anchor_embedding.embed.encoders import load_model, model_revision
from anchor_embedding.embed.export import (
    check_tokenizer,
    export_embedder,
    push_to_hub,
    template_tokenizer,
)
from anchor_embedding.evaluate.candidate import _lineage, find_candidate
from anchor_embedding.evaluate.encoder import MtebEncoder, trained_on
from anchor_embedding.model.agreement import random_model
from anchor_embedding.model.decoder import CausalDecoder
from anchor_embedding.model.loading import add_lora, merge_lora
from anchor_embedding.model.text import TextTokenizer
from anchor_embedding.study.architectures import tiny_random_model
from anchor_embedding.train.recipe_files import load_recipe
from anchor_embedding.train.stage import train

MODELS = {
    "llama3": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm2": "llama",
    "mistral": "mistral",
    "gemma": "gemma3_text",
}
# the classes that published tokenizers declare, and flags of theirs that make transformers write
# its own post-processor
DECLARED = {
    "qwen2": {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False},
    "qwen3": {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False},
    "smollm2": {"tokenizer_class": "GPT2Tokenizer"},
    "mistral": {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False},
    "gemma": {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False},
}
NASTY = [
    "",
    " ",
    "\n\n",
    "\x00",
    "Ċ",
    "▁a ▁",
    "user\n",
    "don't\r\n\tstop",
    "☕ 錨 π",
    "word " * 300,
    "锚把船留在港口。" * 60,
]
NASTY += sorted({f"a{token} {token}b" for traits in KINDS.values() for token in traits["special"]})


@pytest.fixture(scope="module")
def texts():
    """A hundred real texts: of the evaluation's data if present, otherwise of a package's
    documentation.
    """
    if data := os.environ.get("ANCHOR_DATA"):
        found = []
        for name in (
            "nq",
            "xquad_multilingual",
            "stackexchange_title_body",
            "hotpotqa",
            "pubmedqa",
        ):
            with gzip.open(
                Path(data) / "train" / f"{name}.jsonl.gz", "rt", encoding="utf-8"
            ) as file:
                rows = [json.loads(line) for line in itertools.islice(file, 10)]
            found += [text for row in rows for text in (row["query"], row["positive"])]
    else:
        pairs = docstring_pairs(packages=["numpy"], heldout=[], cache=False, workers=1).train[::20][
            :50
        ]
        found = [text for pair in pairs for text in (pair.query, pair.positive)]
    assert len(found) == 100
    return found


def make(folder, kind="smollm2", style="chat", pooling="eos", max_length=96, **declared):
    """A saved tiny embedder, loaded again."""
    decoder = CausalDecoder(tiny_model(MODELS[kind]))
    Embedder(
        decoder, TextTokenizer(tiny_tokenizer(kind), style, max_length), pooling
    ).save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | declared))
    return Embedder.from_pretrained(folder, dtype="float32", device="cpu")


def with_adapter(embedder):
    torch.manual_seed(0)
    add_lora(embedder.decoder, rank=4, alpha=8)
    for name, parameter in embedder.decoder.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return embedder


def load(folder, **options):
    return SentenceTransformer(str(folder), device="cpu", **options)


def worst(a, b):
    """The smallest cosine between rows for the same text."""
    assert a.shape == b.shape and np.isfinite(a).all()
    return ((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min()


@pytest.mark.parametrize("style", ["plain", "chat"])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_vectors(tmp_path, texts, kind, style):
    embedder = make(tmp_path / "model", kind, style, **DECLARED.get(kind, {}))
    asked = {"query": QUERY_INSTRUCTION}
    theirs = load(export_embedder(embedder, tmp_path / "exported", instructions=asked))
    for prompt, instruction in (
        ("", None),
        (f"Instruct: {QUERY_INSTRUCTION}\nQuery: ", QUERY_INSTRUCTION),
    ):
        ids = theirs.tokenizer([prompt + text for text in texts + NASTY], truncation=True)[
            "input_ids"
        ]
        assert ids == [text.ids for text in embedder.tokenizer(texts + NASTY, instruction)]
        assert max(map(len, ids)) == 96 and all(
            row[-1] == embedder.tokenizer.eos_id and row.count(row[-1]) == 1 for row in ids
        )
    ours = embedder.encode(texts + NASTY)
    for theirs.tokenizer.padding_side in ("right", "left"):
        assert worst(theirs.encode(texts + NASTY), ours) > 0.9999
    assert (
        worst(theirs.encode_query(texts), embedder.encode(texts, instruction=QUERY_INSTRUCTION))
        > 0.9999
    )
    assert worst(theirs.encode_document(texts), ours[: len(texts)]) > 0.9999


@pytest.mark.parametrize("kind", ["llama3", "qwen2"])
def test_released_template(tmp_path, texts, kind):
    embedder = make(tmp_path / "model", kind, "released")
    theirs = load(export_embedder(embedder, tmp_path / "exported"))
    assert worst(theirs.encode(texts), embedder.encode(texts)) > 0.9999
    again = Embedder.from_pretrained(tmp_path / "exported", device="cpu")
    # the header occurs once, not twice
    assert again.tokenizer.template == embedder.tokenizer.template


def test_adapter_merged_exported(tmp_path, texts):
    embedder = with_adapter(make(tmp_path / "model", "qwen3"))
    ours = embedder.encode(texts)
    assert worst(ours, make(tmp_path / "untouched", "qwen3").encode(texts)) < 0.99
    embedder.save_pretrained(tmp_path / "checkpoint")
    cases = itertools.product((False, True), ("left", "right"))
    folders = [
        export_embedder(
            embedder, tmp_path / f"{adapter}-{side}", adapter=adapter, padding_side=side
        )
        for adapter, side in cases
    ]
    folders += [
        export_embedder(tmp_path / "checkpoint", tmp_path / f"from-{adapter}", adapter=adapter)
        for adapter in (False, True)
    ]
    for folder in folders:
        attention = "eager" if "left" in folder.name else "sdpa"
        theirs = load(folder, model_kwargs={"attn_implementation": attention})
        assert theirs[0].auto_model.config._attn_implementation == attention
        assert worst(theirs.encode(texts), ours) > 0.9999, folder
        assert (
            worst(
                Embedder.from_pretrained(folder, dtype="float32", device="cpu").encode(texts), ours
            )
            > 0.9999
        ), folder
    assert (
        not (folders[-1] / "model.safetensors").exists()
        and (folders[-1] / "adapter_model.safetensors").exists()
    )
    merge_lora(embedder.decoder)
    assert worst(load(export_embedder(embedder, tmp_path / "merged")).encode(texts), ours) > 0.9999
    with pytest.raises(InputError, match="has no adapter"):
        export_embedder(embedder, tmp_path / "none", adapter=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("pooling", ["last", "mean", "weighted_mean"])
def test_poolings(tmp_path, texts, pooling):
    embedder = make(tmp_path / "model", "gemma", pooling=pooling)
    theirs = load(export_embedder(embedder, tmp_path / "exported", normalize=True))
    for theirs.tokenizer.padding_side in ("right", "left"):
        np.testing.assert_allclose(
            theirs.encode(texts), embedder.encode(texts, normalize=True), atol=1e-4
        )


def test_exported_again(tmp_path, texts):
    """An exported model can be loaded, exported, and saved as one of ours; its dtype stays the
    same.
    """
    make(tmp_path / "model")
    export_embedder(
        Embedder.from_pretrained(tmp_path / "model", "bfloat16", "cpu"), tmp_path / "half"
    )
    folder = export_embedder(tmp_path / "half", tmp_path / "again")
    assert next(load(folder).parameters()).dtype == torch.bfloat16
    again = Embedder.from_pretrained(folder, dtype="float32", device="cpu")
    again.save_pretrained(tmp_path / "ours")
    plain = Embedder.from_pretrained(
        tmp_path / "ours", dtype="float32", device="cpu", template="plain"
    )
    # the tokenizer of training, not the exported one
    assert plain.tokenizer.template.header == ()
    assert (
        worst(
            load(folder, model_kwargs={"dtype": torch.float32}).encode(texts), again.encode(texts)
        )
        > 0.9999
    )


def test_mteb(tmp_path, texts):
    import mteb
    from datasets import Dataset
    from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
    from mteb.types import PromptType
    from torch.utils.data import DataLoader

    embedder = make(tmp_path / "model", "llama3")
    instructions = {
        "query": "find",
        "STS12": "retrieve alike",
        "SciFact-query": "given a claim",
        "Banking77Classification": "classify",
    }
    folder = export_embedder(embedder, tmp_path / "exported", instructions=instructions)
    wrapper = SentenceTransformerEncoderWrapper(str(folder), device="cpu")
    query = PromptType.query
    document = PromptType.document
    cases = [
        ("STS12", None, "retrieve alike"),
        ("STS13", None, None),
        ("SciFact", query, "given a claim"),
        ("SciFact", document, None),
    ]
    cases += [
        ("NFCorpus", query, "find"),
        ("NFCorpus", document, None),
        ("Banking77Classification", None, "classify"),
    ]
    for task, side, instruction in cases:
        loader = DataLoader(Dataset.from_dict({"text": texts}), batch_size=16)
        metadata = mteb.get_task(task).metadata
        found = wrapper.encode(
            loader, task_metadata=metadata, hf_split="test", hf_subset="default", prompt_type=side
        )
        assert worst(np.asarray(found), embedder.encode(texts, instruction=instruction)) > 0.9999, (
            task,
            side,
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory, base):
    """Two stages of training, the second on the result of the first."""
    place = tmp_path_factory.mktemp("runs")
    words = PROSE.split()
    rows = [
        {"query": " ".join(words[i : i + 4]), "positive": " ".join(words[i + 4 : i + 12])}
        for i in range(0, 80, 2)
    ]
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    shared = [
        f"data={place / 'pairs.jsonl'}",
        "batch_size=8",
        "max_length=48",
        "steps=2",
        "dtype=float32",
        "checkpoint_every=1",
    ]
    train(
        load_recipe("stage1", [f"base={base}", *shared]),
        place / "first",
        say=lambda _: None,
        progress=False,
    )
    second = [f"base={place / 'first' / 'final'}", "instructions=none", "hard_negatives=0", *shared]
    train(load_recipe("stage2", second), place / "second", say=lambda _: None, progress=False)
    return place / "second"


def test_a_run_in_the_working_folder_is_no_earlier_stage(tmp_path, monkeypatch):
    """A base may be named without a folder; a card in the working folder is that of another run."""
    for name in ("mine", "other"):
        (tmp_path / name / "final").mkdir(parents=True)
        card = {"recipe": {"name": name, "base": "SmolLM2-135M-Instruct"}}
        (tmp_path / name / "card.json").write_text(json.dumps(card))
    for place, model in (
        (tmp_path, "mine/final"),
        (tmp_path / "mine", "final"),
        (tmp_path / "other", "../mine/final"),
    ):
        monkeypatch.chdir(place)
        assert [card["recipe"]["name"] for card in find_cards(Path(model))] == ["mine"]


@pytest.mark.parametrize(
    ("instructions", "words"),
    [
        ({"query": "Find"}, "Queries take a prompt, documents do not."),
        ({"query": "Find", "document": "a page"}, "Queries and documents take a prompt."),
        ({"query": "", "document": "a page"}, "Documents take a prompt, queries do not."),
        ({"query": ""}, "Neither queries nor documents take a prompt."),
    ],
)
def test_the_card_says_which_side_takes_a_prompt(tmp_path, base, instructions, words):
    folder = export_embedder(base, tmp_path / "exported", instructions=instructions)
    assert words in (folder / "README.md").read_text("utf-8")


def test_an_instruction_that_is_not_the_one_of_training_is_said(tmp_path, base):
    """It reaches sentence-transformers only; without a record of training nothing is known."""
    embedder = Embedder.from_pretrained(base, device="cpu")
    cases = (
        (None, "Find", False),
        ("none", "Find", True),
        ("none", "", False),
        ({"table": {"own": ["Find"]}, "symmetric": []}, "Find", False),
        ({"table": {"own": ["Find"]}, "symmetric": []}, "Seek", True),
        ({"table": {"own": ["Find"], "more": ["Seek"]}, "symmetric": []}, "Find", True),
    )
    for number, (trained, asked, warned) in enumerate(cases):
        embedder.instructions = trained
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            export_embedder(embedder, tmp_path / str(number), instructions={"query": asked})
        said = [str(one.message) for one in seen if "as in training" in str(one.message)]
        assert bool(said) == warned, (trained, asked, said)


@pytest.mark.parametrize("given", [None, "Find", "Seek", ""])
def test_documents_have_the_instruction_that_they_had_in_training(tmp_path, base, capsys, given):
    """Naming the instruction of queries does not take that of the documents away."""
    embedder = Embedder.from_pretrained(base, dtype="float32")
    embedder.instructions = {"table": {"own": ["Find"]}, "symmetric": ["own"]}
    embedder.datasets = ["own"]
    embedder.save_pretrained(tmp_path / "model")
    words = ["export", str(tmp_path / "model"), "--out", str(tmp_path / "exported")]
    assert main([*words, *([] if given is None else ["--instruction", given])]) == 0
    asked = "Find" if given is None else given
    theirs = load(tmp_path / "exported")
    text = ["the ship", "an anchor"]
    for encode in (theirs.encode_query, theirs.encode_document):
        np.testing.assert_allclose(
            encode(text), embedder.encode(text, asked or None, progress=False), atol=1e-5
        )
    explicit = export_embedder(
        tmp_path / "model", tmp_path / "bare", instructions={"query": "Find", "document": None}
    )
    documents = load(explicit).encode_document(text)
    np.testing.assert_allclose(documents, embedder.encode(text, progress=False), atol=1e-5)
    # a corpus that is encoded without it is noted
    (tmp_path / "texts.txt").write_text("\n".join(text))
    words = ["encode", str(tmp_path / "model"), "--in", str(tmp_path / "texts.txt"), "--out"]
    capsys.readouterr()
    for more, noted in (([], True), (["--instruction", "Find"], False)):
        assert main([*words, str(tmp_path / f"{noted}.npy"), *more]) == 0
        said = capsys.readouterr().err
        assert ("documents had an instruction too" in said) == noted, said


def test_the_card_says_that_scores_are_of_longer_texts(tmp_path, run):
    entry = {"main_score": 0.4321, "metric": "ndcg_at_10", "split": "test"}
    for length, said in ((512, True), (None, False)):
        scores = {"model": "x", "about": {"max_length": length}, "tasks": {"NFCorpus": entry}}
        (tmp_path / "scores.json").write_text(json.dumps(scores))
        folder = export_embedder(
            run, tmp_path / str(length), scores=tmp_path / "scores.json", base="owner/a-base"
        )
        text = (folder / "README.md").read_text("utf-8")
        assert ("These scores are of texts of up to 512 tokens" in text) == said
        # the hub lists what is in the header
        assert bool(ModelCard(text).data.eval_results) != said and "43.21" in text


@pytest.mark.parametrize(
    ("asks", "given", "listed", "said"),
    [
        ({"query": "Find it"}, {"query": None, "document": None}, False, "where mteb gives"),
        ({"query": ""}, {"query": "Find it", "document": None}, False, "where mteb gives"),
        ({"query": "Find it"}, {"query": "Find that", "document": None}, True, "of their own"),
        ({"query": "Find it"}, {"query": "Find it", "document": "Find it"}, False, "mteb gives"),
        # a task without sides takes neither prompt, unless one has its name or its type
        ({"query": "Find it"}, {"both": "Find it"}, False, "where mteb gives"),
        ({"query": "Find it"}, {"both": None}, True, ""),
        ({"query": "Find it", "Mine": "Find it"}, {"both": "Find it"}, True, ""),
        ({"query": "Find it", "STS": "Find it"}, {"both": "Find it"}, True, ""),
        ({"query": ""}, {"query": None, "document": None}, True, ""),
    ],
)
def test_scores_of_another_way_to_ask_are_not_in_the_header(
    tmp_path, run, asks, given, listed, said
):
    entry = {"main_score": 0.4321, "metric": "ndcg_at_10", "split": "test", "type": "STS"}
    plain = entry | {"instructions": {"both": None}}
    tasks = {"Mine": entry | {"instructions": given}, "Plain": plain | {"type": "Clustering"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # another instruction than in training
        folder = export_embedder(
            run, tmp_path / "out", scores={"model": "x", "tasks": tasks}, instructions=asks
        )
    text = (folder / "README.md").read_text("utf-8")
    in_header = {result.dataset_name for result in ModelCard(text).data.eval_results}
    assert in_header == ({"Mine", "Plain"} if listed else {"Plain"})
    assert ("Asked with" in text) == bool(said) and said in text


def test_scores_are_those_of_vectors_of_length_1_where_the_model_has_these(tmp_path, run):
    plain = export_embedder(run, tmp_path / "plain", base="owner/a-base")
    unit = export_embedder(run, tmp_path / "unit", base="owner/a-base", normalize=True)
    assert "normalize" not in find_candidate(plain).identity
    identity = find_candidate(unit).identity
    assert identity["normalize"] is True
    where = {"hf_split": "test", "hf_subset": "default"}
    where["task_metadata"] = mteb.get_task("STSBenchmark").metadata
    texts = ["the ship", "a tide that turns"]
    vectors = MtebEncoder(load_model(unit, "float32"), normalize=True).encode(
        [{"text": texts}], **where
    )
    theirs = SentenceTransformer(str(unit), device="cpu").encode(texts)
    np.testing.assert_allclose(vectors, theirs, atol=1e-6)
    entry = {"main_score": 0.4321, "metric": "accuracy", "split": "test"}
    for about, normalize, listed in (
        (identity, True, True),
        (identity, False, False),
        (find_candidate(plain).identity, True, False),
    ):
        scores = {"model": "x", "about": about | {"max_length": None}, "tasks": {"Emotion": entry}}
        del scores["about"]["revision"]
        name = f"{listed}-{normalize}-{'normalize' in about}"
        folder = export_embedder(run, tmp_path / name, scores=scores, normalize=normalize)
        text = (folder / "README.md").read_text("utf-8")
        assert bool(ModelCard(text).data.eval_results) == listed
        assert ("which changes what is not computed from cosines" in text) != listed


def test_card(tmp_path, run, base):
    found = {"main_score": 0.4321, "metric": "cosine_spearman", "split": "test"}
    scores = {"model": "x", "about": {"commit": "abc"}, "tasks": {"STS12": found}}
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    folder = export_embedder(
        run, tmp_path / "exported", scores=tmp_path / "scores.json", base="owner/a-base"
    )
    card = ModelCard.load(folder / "README.md")
    header = card.data.to_dict()
    assert (
        header["library_name"] == "sentence-transformers"
        and header["pipeline_tag"] == "sentence-similarity"
    )
    assert (
        header["base_model"] == "owner/a-base"
        and header["base_model_relation"] == "finetune"
        and header["license"] == "mit"
    )
    assert "sentence-transformers" in header["tags"]
    cards = find_cards(run / "final")
    assert [found["recipe"]["objective"] for found in cards] == ["reconstruction", "contrastive"]
    expected = [
        *(found["fingerprint"] for found in cards),
        cards[1]["competitors"],
        f"| temperature | {cards[1]['recipe']['temperature']} |",
    ]
    for text in (*expected, "| STS12 | test | cosine_spearman | 43.21 |", "commit: abc"):
        assert text in card.text, text
    assert (
        "Differences from the recipe stage" in card.text
        and "| batch size | 8 |" not in card.text
        and "| batch_size | 8 |" in card.text
    )
    assert (
        str(tmp_path.parent) not in card.text
        and str(base) not in card.text
        and str(run.parent) not in card.text
    )
    prompts = json.loads((folder / "config_sentence_transformers.json").read_text())["prompts"]
    assert prompts == {"query": "", "document": ""}  # it was trained without instructions
    for block in card.text.split("```python")[1:]:
        compile(block.split("```")[0], "card", "exec")


def test_an_exported_model_is_known_like_its_run(tmp_path, run, base):
    """Compared, scored and exported again like the run, without a path of this machine."""
    folder = export_embedder(run / "step-000002", tmp_path / "exported", base="owner/a-base")
    again = export_embedder(folder, tmp_path / "again")
    expected = find_cards(run / "step-000002")
    for model in (folder, again):
        cards = find_cards(model)
        assert _lineage(cards) == _lineage(expected)
        assert _lineage(cards) != _lineage(find_cards(run / "final"))
        assert [card["datasets"] for card in cards] == [card["datasets"] for card in expected]
        assert trained_on(model) == trained_on(run / "step-000002")
        page = ModelCard.load(model / "README.md")
        assert (page.data["base_model"], page.data["license"]) == ("owner/a-base", "mit")
        assert "reconstruction" in page.text and "contrastive" in page.text
        for path in model.rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            assert str(run.parent).encode() not in content, path
            assert str(base.parent).encode() not in content, path


def test_an_export_of_an_export_keeps_its_length_and_names_what_it_does_not(tmp_path, base):
    first = export_embedder(
        base, tmp_path / "first", instructions={"query": "Seek"}, normalize=True
    )
    with pytest.warns(UserWarning, match=r"was exported with the prompts .*Seek.*--instruction"):
        second = export_embedder(first, tmp_path / "second")
    names = [module["path"] for module in json.loads((second / "modules.json").read_text())]
    assert names[-1] == "2_Normalize"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        export_embedder(second, tmp_path / "third")
        export_embedder(first, tmp_path / "fourth", instructions={"query": "Seek"})


def test_checkpoint_of_a_run(tmp_path, run, texts):
    """A checkpoint that is an adapter on its base is exported with the card of its run."""
    folder = export_embedder(run / "step-000002", tmp_path / "exported", adapter=True)
    assert "lora" in ModelCard.load(folder / "README.md").data.to_dict()["tags"]
    assert (
        worst(
            load(folder).encode(texts), load(export_embedder(run, tmp_path / "final")).encode(texts)
        )
        > 0.9999
    )
    assert "contrastive" in (folder / "README.md").read_text()


class Hub:
    """Stands in for the hub and records the requests."""

    def __init__(self, calls):
        self.calls = calls

    def create_repo(self, name, **options):
        self.calls.append((name, options))

    def upload_folder(self, **options):
        written = sorted(path.name for path in Path(options["folder_path"]).iterdir())
        self.calls.append(written)
        # what an earlier export left there is removed, and nothing of the owner's
        there = ["adapter_model.safetensors", "onnx/model.onnx", "LICENSE", "README.md", "own.py"]
        gone = filter_repo_objects(there, allow_patterns=options["delete_patterns"])
        assert [*gone] == there[:2]
        inside = [
            str(path.relative_to(options["folder_path"]))
            for path in Path(options["folder_path"]).rglob("*")
            if path.is_file()
        ]
        assert {*inside} - {
            *filter_repo_objects(inside, allow_patterns=options["delete_patterns"])
        } == {"README.md"}
        return "https://hub/owner/name"


def test_push(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: Hub(calls))
    folder = export_embedder(make(tmp_path / "model"), tmp_path / "exported", push="owner/name")
    created, uploaded = calls
    assert created == ("owner/name", {"private": True, "exist_ok": True})
    assert {
        "README.md",
        "modules.json",
        "model.safetensors",
        "anchor_embedding.json",
        "tokenizer.json",
    } <= set(uploaded)
    assert 'SentenceTransformer("owner/name")' in (folder / "README.md").read_text()


def test_push_an_adapter(tmp_path, monkeypatch):
    """A pushed model names a base that others can load; otherwise it is not pushed."""
    calls = []
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: Hub(calls))
    embedder = with_adapter(make(tmp_path / "model"))
    with pytest.raises(InputError, match="the base of this adapter is a local folder"):
        export_embedder(embedder, tmp_path / "exported", adapter=True, push="owner/name")
    assert not calls and not (tmp_path / "exported").exists()
    (configured,) = embedder.decoder.model.peft_config.values()
    configured.base_model_name_or_path = "owner/other"
    configured.revision = "1" * 40
    for base, revision in (("owner/base", None), ("owner/other", "1" * 40)):
        folder = tmp_path / base
        unknown = (
            nullcontext() if revision else pytest.warns(UserWarning, match="is not known here")
        )
        with unknown:
            export_embedder(embedder, folder, adapter=True, push="owner/name", base=base)
        named = json.loads((folder / "adapter_config.json").read_text())
        assert named["base_model_name_or_path"] == base
        # the commit of another base is none of this one
        assert named["revision"] == revision
    assert len(calls) == 4


def test_an_adapter_names_no_base_with_other_weights(tmp_path):
    embedder = with_adapter(make(tmp_path / "model"))
    embedder.save_pretrained(tmp_path / "step-000002")
    same = shutil.copytree(tmp_path / "model", tmp_path / "same")
    make(other := tmp_path / "other", "qwen2")
    for source in (embedder, tmp_path / "step-000002"):
        folder = export_embedder(
            source, tmp_path / f"on-{type(source).__name__}", True, base=str(same)
        )
        settings = json.loads((folder / "anchor_embedding.json").read_text())
        assert settings["base_digest"] == weights_digest(same)
        Embedder.from_pretrained(folder)
        with pytest.raises(InputError, match=r"other has other weights than .*model, on which"):
            export_embedder(source, tmp_path / "refused", adapter=True, base=str(other))
    assert not (tmp_path / "refused").exists()


FROM_HUB = """
import sys
import warnings
import numpy as np
from sentence_transformers import SentenceTransformer
from anchor_embedding.embed.embedder import Embedder
from anchor_embedding.embed.export import export_embedder

found = []
for name in ("owner/merged", "owner/adapter"):
    found.append(Embedder.from_pretrained(name, dtype="float32", device="cpu").encode(sys.argv[3:]))
    found.append(SentenceTransformer(name, device="cpu").encode(sys.argv[3:]))
np.save(sys.argv[1], found)

import torch
from anchor_embedding.model.loading import hub_identity
from anchor_embedding.train.prepare import prepare_embedder
from anchor_embedding.train.recipe_files import load_recipe

commit = "0" * 40
assert hub_identity(".") is None and hub_identity("owner/other") is None
assert hub_identity("owner/merged") == ("owner/merged", commit)
recipe = load_recipe("stage1", ["base=owner/merged", "data=docstrings", "instructions=none"])
bases = {"owner/merged": commit, f"owner/merged@{commit}": commit, sys.argv[2]: None}
for name, vectors in zip(("owner/merged", "owner/adapter"), found[::2], strict=True):
    pinned = Embedder.from_pretrained(f"{name}@{commit}", dtype="float32", device="cpu")
    assert (pinned.encode(sys.argv[3:]) == vectors).all()
# an export by the plain name knows the prompts and the adapter too
out = sys.argv[1] + ".exports"
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    export_embedder("owner/merged", out + "/merged")
assert any("was exported with the prompts" in str(one.message) for one in said)
assert "base_model: owner/merged" in open(out + "/merged/README.md").read()
export_embedder("owner/adapter", out + "/adapter", adapter=True)
export_embedder("owner/adapter", out + "/whole")
for name in ("merged", "adapter", "whole"):
    exported = Embedder.from_pretrained(f"{out}/{name}", dtype="float32", device="cpu")
    assert np.allclose(exported.encode(sys.argv[3:]), found[0], atol=1e-3)
digests = set()
for base, revision in bases.items():
    embedder, card = prepare_embedder(recipe.replace(base=base), torch.device("cpu"))
    assert card.get("base_revision") == embedder.decoder.revision == revision, card
    if revision:
        assert embedder.decoder.model.name_or_path == "owner/merged"
        digests.add((card["base_digest"], card["base_files_digest"]))
assert len(digests) == 1 and all(digests.pop())
"""


@pytest.mark.thorough
def test_from_the_hub(tmp_path, texts):
    """A model loaded by its hub name, here from the hub's cache, equals the one in a folder."""
    embedder = with_adapter(make(tmp_path / "model", "mistral"))
    for name in ("merged", "adapter"):
        repository = tmp_path / "hub" / f"models--owner--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        asked = {"query": "Find it"} if name == "merged" else None
        snapshot = repository / "snapshots" / ("0" * 40)
        export_embedder(embedder, snapshot, adapter=name == "adapter", instructions=asked)
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    few = [text for text in texts if "\0" not in text][:6]
    command = [
        sys.executable,
        "-c",
        FROM_HUB,
        str(tmp_path / "found.npy"),
        str(tmp_path / "model"),
        *few,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for vectors in np.load(tmp_path / "found.npy"):
        assert worst(vectors, embedder.encode(few)) > 0.9999


def test_push_without_a_hub(tmp_path):
    """Without network or credentials there is one clear error, and the export stays."""
    (tmp_path / "README.md").write_text("a model")
    for name in ("owner/name", "no such name/"):
        with pytest.raises(
            InputError, match=f"the model hub did not take {name}: .* the export itself is complete"
        ):
            push_to_hub(tmp_path, name)


def test_bad_input(tmp_path):
    embedder = make(tmp_path / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for place in ("full", "file"):
        with pytest.raises(InputError, match="it already exists; name a new folder"):
            export_embedder(embedder, tmp_path / place)
    with pytest.raises(InputError, match="cannot write"):
        export_embedder(embedder, tmp_path / "file" / "inside")
    for scores in ("none.json", "file"):
        with pytest.raises(InputError, match=r"is no scores\.json"):
            export_embedder(embedder, tmp_path / "new", scores=tmp_path / scores)
    with pytest.raises(InputError, match="cannot load model"):
        export_embedder(tmp_path / "no-such-model", tmp_path / "new")
    with pytest.raises(InputError, match="padding_side is 'middle'"):
        export_embedder(embedder, tmp_path / "new", padding_side="middle")
    embedder.pooling = "cls"
    with pytest.raises(
        InputError,
        match="no pooling 'cls'; an exported model can have eos, last, mean, weighted_mean",
    ):
        export_embedder(embedder, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "model"]
    assert (
        (tmp_path / "full" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"
    )


def test_left_padding_is_tried(tmp_path):
    """HunYuan's attention depends on absolute positions, which padding on the left moves."""
    causal_lm = tiny_random_model("hunyuan_v1_dense")
    tokenizer = tiny_tokenizer("smollm2")
    causal_lm.resize_token_embeddings(len(tokenizer))
    embedder = Embedder(CausalDecoder(causal_lm), TextTokenizer(tokenizer, "plain", 40))
    with pytest.raises(InputError, match="with padding on the left this model computes other vect"):
        export_embedder(embedder, tmp_path / "left", padding_side="left")
    assert not (tmp_path / "left").exists()
    export_embedder(embedder, tmp_path / "right")


def test_adapter_in_an_older_file(tmp_path):
    """An adapter that is kept as adapter_model.bin is exported alone, as safetensors."""
    embedder = with_adapter(make(tmp_path / "model"))
    folder = export_embedder(embedder, tmp_path / "adapter", adapter=True)
    weights = folder / "adapter_model.safetensors"
    torch.save(load_file(weights), folder / "adapter_model.bin")
    weights.unlink()
    again = export_embedder(folder, tmp_path / "again", adapter=True)
    found = Embedder.from_pretrained(again, dtype="float32", device="cpu").encode(["a ship"])
    assert worst(found, embedder.encode(["a ship"])) > 0.9999


def test_what_no_tokenizer_can_say(tmp_path):
    cut = TextTokenizer(tiny_tokenizer("llama3"), "released", 40, cut_eos=True)
    with pytest.raises(InputError, match="cut_eos cuts the EOS off long texts"):
        template_tokenizer(cut)

    class Slow:
        is_fast = False

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __call__(self, *args, **options):
            return tokenizer(*args, **options)

    tokenizer = tiny_tokenizer("smollm2")
    with pytest.raises(InputError, match="Slow is a slow tokenizer"):
        template_tokenizer(TextTokenizer(Slow(), "plain"))
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="cannot be exported"):
        check_tokenizer(TextTokenizer(tokenizer, "chat"), tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("a").input_ids


def test_scores_of_other_weights_are_refused_and_its_own_taken(tmp_path):
    for seed in (1, 2):
        decoder = CausalDecoder(tiny_model(seed=seed))
        Embedder(decoder, TextTokenizer(tiny_tokenizer("smollm2"), max_length=64)).save_pretrained(
            tmp_path / str(seed)
        )
    scores = {
        "tasks": {"STS12": {"main_score": 0.5}},
        "about": {"revision": model_revision(tmp_path / "1")},
    }
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    with pytest.raises(InputError, match="the scores are of revision"):
        export_embedder(tmp_path / "2", tmp_path / "out", scores=tmp_path / "scores.json")
    assert not (tmp_path / "out").exists()
    assert (
        "50.00"
        in (
            export_embedder(tmp_path / "1", tmp_path / "out", scores=tmp_path / "scores.json")
            / "README.md"
        ).read_text()
    )


SHAPE = {
    "vocab_size": 420,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
SHARE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
GEMMA4 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": SHARE | {"rope_type": "proportional"},
}


@pytest.mark.parametrize(
    ("kind", "settings", "names"),
    [
        # the default of the padding is beyond this vocabulary
        ("phi3", {"rope_parameters": SHARE}, {"partial_rotary_factor": 0.75}),
        ("smollm3", {}, {"rope_theta": 2e6}),
        ("gpt_neox", {"rotary_pct": 1.0}, {"partial_rotary_factor": 1.0, "rotary_pct": 1.0}),
        ("gemma4_unified_text", {"rope_parameters": GEMMA4}, {"rope_local_base_freq": 1e4}),
    ],
)
def test_other_programs_read_the_configuration(tmp_path, kind, settings, names):
    """transformers 4 takes these names, which transformers 5 does not write; and the folder still
    loads in transformers 5 with the same vectors.
    """
    if kind.startswith("gemma4"):
        settings = settings | {
            "head_dim": 16,
            "global_head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    model = random_model(AutoConfig.for_model(kind, **SHAPE | settings))
    embedder = Embedder(CausalDecoder(model), TextTokenizer(tiny_tokenizer("qwen2"), "plain", 96))
    folder = export_embedder(embedder, tmp_path / "exported")
    config = json.loads((folder / "config.json").read_text())
    assert {name: config[name] for name in names} == names
    expected = embedder.encode(NASTY[:12])
    np.testing.assert_allclose(load(folder).encode(NASTY[:12]), expected, atol=1e-4)
    np.testing.assert_allclose(
        Embedder.from_pretrained(folder, "float32").encode(NASTY[:12]), expected, atol=1e-4
    )


def test_a_padding_without_an_embedding_is_replaced(tmp_path):
    """As some fine-tuned models have it: the tokenizer got a padding, the embeddings did not."""
    model = tiny_model("llama")
    tokenizer = tiny_tokenizer("llama3")
    tokenizer.add_special_tokens({"pad_token": "<padding>"})
    assert tokenizer.pad_token_id >= model.config.vocab_size
    embedder = Embedder(CausalDecoder(model), TextTokenizer(tokenizer, "plain", 96))
    theirs = load(export_embedder(embedder, tmp_path / "exported"))
    np.testing.assert_allclose(theirs.encode(NASTY), embedder.encode(NASTY), atol=1e-4)
