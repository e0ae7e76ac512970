"""An exported model's ONNX graph in onnxruntime gives our vectors for every model, padding and
length; a model that no graph can represent is refused before anything is written.
"""

import json
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import torch
from serving_speed import OnnxEmbedder, least_cosine
from transformers import AutoTokenizer

from anchor_embedding.cli.main import main
from anchor_embedding.common.errors import InputError
from anchor_embedding.common.tiny import PROSE, tiny_model, tiny_tokenizer
from anchor_embedding.embed import onnx
from anchor_embedding.embed.embedder import QUERY_INSTRUCTION, Embedder
from anchor_embedding.embed.export import export_embedder
from anchor_embedding.model.bidirectional import set_attention
from anchor_embedding.model.decoder import CausalDecoder
from anchor_embedding.model.loading import add_lora
from anchor_embedding.model.soft_tokens import SoftTokens
from anchor_embedding.model.text import TextTokenizer

MAX_LENGTH = 96
TEXTS = [*PROSE.splitlines(), "", "a", " two  spaces ", "the anchor " * 20, "word " * 300]
TOKENIZERS = {"llama": "llama3", "qwen2": "qwen2", "qwen3": "qwen3", "mistral": "mistral"}


def make(kind="llama", pooling="eos", **overrides):
    """A tiny embedder with its chat template."""
    tokenizer = TextTokenizer(tiny_tokenizer(TOKENIZERS[kind]), "chat", MAX_LENGTH)
    return Embedder(CausalDecoder(tiny_model(kind, **overrides)), tokenizer, pooling)


def run(folder, texts, side="right", batch_size=4):
    """Vectors from onnxruntime, of batches that the exported tokenizer pads."""
    session = onnxruntime.InferenceSession(folder / onnx.ONNX_FILE)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    found = []
    for start in range(0, len(texts), batch_size):
        batch = texts[start : start + batch_size]
        inputs = tokenizer(batch, truncation=True, padding=True, return_tensors="np")
        inputs = {name: values.astype(np.int64) for name, values in inputs.items()}
        found.append(session.run(["sentence_embedding"], inputs)[0])
    return np.concatenate(found)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A Llama with an adapter, and its export."""
    embedder = make()
    torch.manual_seed(0)
    add_lora(embedder.decoder, rank=4, alpha=8)
    for name, parameter in embedder.decoder.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    folder = tmp_path_factory.mktemp("onnx") / "model"
    return embedder, export_embedder(embedder, folder, onnx=True)


@pytest.mark.parametrize("side", ["right", "left"])
def test_vectors_are_ours_with_and_without_instruction(exported, side):
    embedder, folder = exported
    queries = [f"Instruct: {QUERY_INSTRUCTION}\nQuery: {text}" for text in TEXTS]
    assert max(len(text) for text in embedder.tokenizer(TEXTS)) == MAX_LENGTH
    assert least_cosine(run(folder, TEXTS, side), embedder.encode(TEXTS)) > 0.9999
    asked = embedder.encode(TEXTS, QUERY_INSTRUCTION)
    assert least_cosine(run(folder, queries, side), asked) > 0.9999
    assert least_cosine(run(folder, queries, side), embedder.encode(TEXTS)) < 0.999


def test_a_text_has_the_same_vector_alone_and_in_a_batch(exported):
    _, folder = exported
    together = run(folder, TEXTS, batch_size=len(TEXTS))
    np.testing.assert_allclose(run(folder, TEXTS, batch_size=1), together, atol=1e-4)


@pytest.mark.parametrize(
    "kind, pooling, overrides",
    [
        ("qwen2", "eos", {}),
        pytest.param("qwen3", "mean", {}, marks=pytest.mark.thorough),
        pytest.param(
            "mistral", "weighted_mean", {"sliding_window": 16}, marks=pytest.mark.thorough
        ),
    ],
)
def test_every_family_and_pooling_of_length_one_padded_left(tmp_path, kind, pooling, overrides):
    embedder = make(kind, pooling, **overrides)
    folder = export_embedder(
        embedder, tmp_path / "model", onnx=True, normalize=True, padding_side="left"
    )
    for side in ("left", "right"):
        vectors = run(folder, TEXTS, side)
        np.testing.assert_allclose(vectors, embedder.encode(TEXTS, normalize=True), atol=1e-4)


def test_nothing_but_onnxruntime_and_tokenizers_is_needed(exported, tmp_path):
    embedder, folder = exported
    code = """
import json, sys
import numpy, onnxruntime
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(f"{sys.argv[1]}/tokenizer.json")
tokenizer.encode_special_tokens = True
ids = tokenizer.encode("The anchor <|eot_id|>").ids
inputs = {"input_ids": numpy.array([ids]), "attention_mask": numpy.ones((1, len(ids)), int)}
session = onnxruntime.InferenceSession(f"{sys.argv[1]}/onnx/model.onnx")
assert not {"torch", "transformers"} & set(sys.modules)
print(json.dumps(session.run(["sentence_embedding"], inputs)[0][0].tolist()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    expected = embedder.encode("The anchor <|eot_id|>")
    np.testing.assert_allclose(json.loads(done.stdout), expected, rtol=1e-3, atol=1e-3)


def test_the_embedder_of_the_page_cuts_and_pads_as_ours(exported):
    embedder, folder = exported
    nasty = [*TEXTS, "a <|eot_id|> b", "☕ 錨 π"]
    assert least_cosine(OnnxEmbedder(folder, 1).encode(nasty), embedder.encode(nasty)) > 0.9999


@pytest.mark.thorough
def test_the_command_writes_it_in_bfloat16_models_too(tmp_path, capsys):
    embedder = make("qwen2")
    embedder.decoder.model.bfloat16()
    embedder.save_pretrained(tmp_path / "run")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), "--out", str(out), "--format", "onnx"]) == 0
    assert str(out / onnx.ONNX_FILE) in capsys.readouterr().err
    ours = Embedder.from_pretrained(out, dtype="float32", device="cpu")
    assert least_cosine(run(out, TEXTS), ours.encode(TEXTS)) > 0.9999


def test_without_the_word_there_is_no_graph(tmp_path):
    assert not (export_embedder(make(), tmp_path / "model") / onnx.ONNX_FILE).exists()


@pytest.mark.thorough
def test_a_graph_that_is_not_the_model_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "_weights", lambda mask, pooling: mask / mask.sum(1, keepdim=True))
    with pytest.raises(InputError, match="the ONNX graph differs from this model"):
        export_embedder(make(), tmp_path / "model", onnx=True)
    assert not list(tmp_path.iterdir())


def soft():
    return Embedder(make().decoder, make().tokenizer, "mean", SoftTokens(steps=2))


def bidirectional():
    embedder = make()
    embedder.decoder.model.set_attn_implementation("anchor_packed")
    set_attention(embedder.decoder, "bidirectional")
    return embedder


@pytest.mark.parametrize(
    "model, options, message",
    [
        (soft, {}, "no pooling 'mean of soft tokens'"),
        (bidirectional, {}, "trained to read in both directions"),
        (make, {"adapter": True}, "holds merged weights; leave out adapter, or onnx"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(tmp_path, model, options, message):
    with pytest.raises(InputError, match=message):
        export_embedder(model(), tmp_path / "model", onnx=True, **options)
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named_first(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(InputError, match="needs onnxscript; run: pip install onnxscript"):
        export_embedder(make(), tmp_path / "model", onnx=True)
    assert not list(tmp_path.iterdir())
