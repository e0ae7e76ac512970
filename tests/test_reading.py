"""Reading vectors of models on disk: whole models, adapters, every architecture and template, and
what cannot be read.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import GenerationConfig

from anchor_embedding.common.errors import InputError
from anchor_embedding.common.tiny import MODEL_KINDS, tiny_model, tiny_tokenizer
from anchor_embedding.data.examples import Example
from anchor_embedding.embed.embedder import Embedder
from anchor_embedding.embed.reading import (
    Reading,
    Readings,
    generate,
    read_anchors,
    read_vectors,
    reading_report,
    reconstruction_losses,
)
from anchor_embedding.model.loading import add_lora, load_decoder, merge_lora
from anchor_embedding.model.packing import pack
from anchor_embedding.study.architectures import tiny_random_model

LOAD = {"dtype": "float32", "device": "cpu"}
PAIRS = [
    Example("what holds the ship", "the anchor"),
    Example("what turns", "the tide"),
    Example("who asks", "a query asks"),
]


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    """Adapters that change the result, on the tiny base model."""
    embedder = Embedder.from_pretrained(base, **LOAD)
    torch.manual_seed(0)
    add_lora(embedder.decoder, rank=4, alpha=8)
    for name, parameter in embedder.decoder.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp("adapter") / "model"
    embedder.save_pretrained(folder)
    return folder, embedder


@torch.no_grad()
def by_transformers(model, anchor, tokens, opening=()):
    """Greedy ids after an anchor, by the plain model of transformers, which recomputes the whole
    sequence for every token.
    """
    given = torch.cat(
        [
            model.get_input_embeddings()(torch.tensor([opening], dtype=torch.int64)),
            anchor[None, None],
        ],
        dim=1,
    )
    for _ in range(tokens):
        ids = model(inputs_embeds=given, use_cache=False).logits[0, -1].argmax()
        yield ids.item()
        given = torch.cat([given, model.get_input_embeddings()(ids[None, None])], dim=1)


def test_the_reading_is_that_of_the_plain_model(base):
    embedder = Embedder.from_pretrained(base, **LOAD)
    model = tiny_model("llama")
    texts = ["The anchor holds the ship.", "tokens"]
    ids = [torch.tensor([text.ids]) for text in embedder.tokenizer(texts)]
    with torch.no_grad():
        anchors = [model.base_model(input_ids=one).last_hidden_state[0, -1] for one in ids]
    expected = [list(by_transformers(model, anchor, 10)) for anchor in anchors]
    assert generate(embedder.decoder, torch.stack(anchors), 10) == expected
    header = embedder.tokenizer.tokenizer.convert_tokens_to_ids(["<|im_start|>", "u", "ser", "Ċ"])
    expected = [list(by_transformers(model, anchor, 10, header)) for anchor in anchors]
    ends = {embedder.tokenizer.eos_id}
    assert not any(ends & set(one) for one in expected), (
        "the random model ends a text; choose other texts"
    )
    readings = read_anchors(embedder, texts, max_new_tokens=10)
    assert [one.greedy for one in readings] == [
        embedder.tokenizer.tokenizer.decode(one) for one in expected
    ]
    with torch.no_grad():
        opened = torch.cat([model.get_input_embeddings()(torch.tensor(header)), anchors[0][None]])
        chances = model(inputs_embeds=opened[None]).logits[0, -1].softmax(-1)
    assert readings[0].next_tokens[0][1] == pytest.approx(chances.max().item(), rel=1e-4)
    assert len(readings[0].next_tokens) == 5


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_every_architecture_from_disk(kind, tmp_path):
    tiny_model(kind, tied=False).save_pretrained(tmp_path)
    tiny_tokenizer({"llama": "llama3", "gemma3_text": "gemma"}.get(kind, kind)).save_pretrained(
        tmp_path
    )
    embedder = Embedder.from_pretrained(tmp_path, **LOAD)
    texts = ["錨は船を支える。", "a <b>query</b>\nasks", "tokens"]
    plain = [one.greedy for one in read_anchors(embedder, texts, max_new_tokens=8)]
    together = embedder_readings(embedder, texts)
    assert together == plain == embedder_readings(embedder, texts, decode_opening="encode")
    assert together == [embedder_readings(embedder, [text])[0] for text in texts]
    assert embedder_readings(embedder, texts, decode_opening="none") != together


@pytest.mark.parametrize("kind", ["afmoe", "jetmoe"])
def test_attentions_that_view_their_result_write_what_transformers_writes(kind, tmp_path):
    plain = tiny_random_model(kind).eval()
    plain.save_pretrained(tmp_path)
    decoder = load_decoder(str(tmp_path))
    anchors = torch.randn(3, decoder.hidden_size, generator=torch.Generator().manual_seed(0))
    opening = plain.get_input_embeddings()(torch.tensor([[7, 8]] * 3))
    expected = plain.generate(
        inputs_embeds=torch.cat([opening, anchors[:, None] / decoder.embedding_scale], dim=1),
        attention_mask=torch.ones(3, 3, dtype=torch.int64),
        generation_config=GenerationConfig(max_new_tokens=6, eos_token_id=None, pad_token_id=0),
    )
    assert generate(decoder, anchors, 6, before=[7, 8]) == expected.tolist()


def embedder_readings(embedder, texts, **settings):
    """Readings are greedy; the checkpoint's generation settings must not matter."""
    embedder.decoder.causal_lm.generation_config.repetition_penalty = 3.0
    return [one.greedy for one in read_anchors(embedder, texts, max_new_tokens=8, **settings)]


def test_adapters_are_read_as_merged(adapter, base):
    folder, embedder = adapter
    texts = [pair.query for pair in PAIRS]
    bare, loaded = (Embedder.from_pretrained(name, **LOAD) for name in (base, folder))
    read = [embedder_readings(one, texts) for one in (embedder, loaded, bare)]
    assert read[0] == read[1] != read[2]
    losses = [reconstruction_losses(one, PAIRS) for one in (embedder, loaded, bare)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-4)
    assert abs(losses[0]["q2d"] - losses[2]["q2d"]) > 0.01
    assert embedder.decoder.adapted, "reading must leave the adapters on"
    merge_lora(loaded.decoder)
    assert embedder_readings(loaded, texts) == read[0]


def test_losses_by_hand(base):
    embedder = Embedder.from_pretrained(base, **LOAD)
    decoder = embedder.decoder
    anchors = torch.from_numpy(embedder.encode([pair.query for pair in PAIRS]))
    bodies = [text.body for text in embedder.tokenizer([pair.positive for pair in PAIRS])]
    header = embedder.tokenizer.tokenizer.convert_tokens_to_ids(["<|im_start|>", "u", "ser", "Ċ"])

    @torch.no_grad()
    def mean_loss(anchors):
        total = 0.0
        for anchor, body in zip(anchors, bodies, strict=True):
            states = decoder.decode(
                anchor[None], pack([[*header, 0, *body[:-1]]]), torch.tensor([len(header)])
            )[len(header) :]
            total += F.cross_entropy(
                F.linear(states, decoder.head.weight), torch.tensor(body), reduction="sum"
            ).item()
        return total / sum(map(len, bodies))

    decoder.train()
    losses = reconstruction_losses(embedder, PAIRS, token_budget=1)
    assert decoder.training
    assert losses["q2d"] == pytest.approx(mean_loss(anchors), rel=1e-4)
    assert losses["anchor_gain_q2d"] == pytest.approx(
        mean_loss(anchors.roll(-1, 0)) - mean_loss(anchors), rel=1e-3, abs=1e-4
    )
    assert set(losses) == {"q2d", "d2q", "anchor_gain_q2d", "anchor_gain_d2q", "mean_cosine"}


def test_a_model_is_read_with_the_opening_it_was_saved_with(base, tmp_path):
    embedder = Embedder.from_pretrained(base, **LOAD)
    readings = {}
    for opening in ("encode", "none"):
        embedder.decode_opening = opening
        embedder.save_pretrained(tmp_path / opening)
        loaded = Embedder.from_pretrained(tmp_path / opening, **LOAD)
        readings[opening] = embedder_readings(loaded, ["tokens"])
        assert readings[opening] == embedder_readings(embedder, ["tokens"])
        losses = reconstruction_losses(loaded, PAIRS)
        assert losses == pytest.approx(
            reconstruction_losses(embedder, PAIRS, decode_opening=opening), rel=1e-5, abs=1e-5
        )
    assert readings["encode"] != readings["none"], "another opening must give another reading"
    for opening, expected in readings.items():
        assert embedder_readings(loaded, ["tokens"], decode_opening=opening) == expected
    settings = tmp_path / "none" / "anchor_embedding.json"
    settings.write_text(
        json.dumps(
            {
                key: value
                for key, value in json.loads(settings.read_text()).items()
                if key != "decode_opening"
            }
        )
    )
    assert (
        embedder_readings(Embedder.from_pretrained(tmp_path / "none", **LOAD), ["tokens"])
        == readings["encode"]
    )


@pytest.mark.parametrize("training", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_eight_threads_read_and_encode_at_once(base, training):
    """A model that reads causally and encodes in both directions, by itself and with adapters whose
    dropout is on.
    """
    embedder = Embedder.from_pretrained(base, **LOAD, attention="bidirectional", pooling="mean")
    if training:
        add_lora(embedder.decoder, rank=4, alpha=8, dropout=0.5).train()
        for name, parameter in embedder.decoder.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(
                    parameter, std=0.2, generator=torch.Generator().manual_seed(0)
                )
    texts = [f"{pair.query} {'and what else ' * n}" for n, pair in enumerate(PAIRS)]
    model = embedder.decoder.causal_lm
    jobs = [
        lambda: embedder.encode(texts, progress=False).tolist(),
        lambda: read_anchors(embedder, texts, samples=2, max_new_tokens=12),
        lambda: read_anchors(
            embedder, texts[:1], samples=3, max_new_tokens=5, seed=3, decode_opening="none"
        ),
    ]
    expected = [job() for job in jobs]
    before = (
        model.config.to_json_string(),
        model.config._attn_implementation,
        model.generation_config.to_json_string(),
    )
    own = model.generation_config
    state = torch.get_rng_state()
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(job) for _ in range(8) for job in jobs]
        for number, future in enumerate(found):
            assert future.result() == expected[number % len(jobs)]
    after = (
        model.config.to_json_string(),
        model.config._attn_implementation,
        model.generation_config.to_json_string(),
    )
    assert before == after and model.generation_config is own
    assert torch.equal(torch.get_rng_state(), state), "the global random numbers were used"
    assert {module.training for module in embedder.decoder.modules()} == {training}


def test_vectors_are_read_from_any_array(base):
    embedder = Embedder.from_pretrained(base, **LOAD)
    vectors = embedder.encode(["what holds the ship", "a tide that turns"])
    expected = read_vectors(embedder, vectors, max_new_tokens=6)
    tensor = torch.tensor(vectors)
    for same in (vectors[::-1][::-1], vectors.tolist(), tensor, tensor.double().requires_grad_()):
        assert read_vectors(embedder, same, max_new_tokens=6) == expected
    backwards = read_vectors(embedder, vectors[::-1], ["vector 1", "vector 0"], max_new_tokens=6)
    assert [*backwards] == [*expected][::-1]
    assert len(read_vectors(embedder, tensor.bfloat16(), max_new_tokens=6)) == 2


def test_instructions_change_the_vector_and_so_the_reading(base):
    embedder = Embedder.from_pretrained(base, **LOAD)
    readings = read_anchors(
        embedder, "what holds the ship", instruction="find the text", max_new_tokens=6
    )
    vectors = embedder.encode(["what holds the ship"], instruction="find the text")
    assert readings[0].greedy == read_vectors(embedder, vectors, max_new_tokens=6)[0].greedy
    assert (
        readings[0].greedy
        != read_anchors(embedder, "what holds the ship", max_new_tokens=6)[0].greedy
    )


def test_bfloat16_products_can_be_read(base):
    embedder = Embedder.from_pretrained(base, **LOAD)
    embedder.decoder.compute_dtype = torch.bfloat16
    readings = read_anchors(embedder, ["tokens"], samples=2, max_new_tokens=5)
    assert (
        len(readings[0].samples) == 2
        and abs(sum(chance for _, chance in readings[0].next_tokens)) <= 1.001
    )
    assert np.isfinite(list(reconstruction_losses(embedder, PAIRS).values())).all()


def test_readings_show_text_as_text():
    nasty = Reading(
        "<script>alert(1)</script>\n& more", "a\nb", ("<i>",), (("<", 0.9), ("&", 0.001))
    )
    page = Readings([nasty])._repr_html_()
    assert (
        "<script" not in page
        and "<i>" not in page
        and "&lt;script&gt;" in page
        and "&amp; more" in page
    )
    lines = str(Readings([nasty, nasty])).splitlines()
    assert lines[0] == "text         <script>alert(1)</script>" and lines[1] == " " * 13 + "& more"
    assert "first token  '<' 90%" in lines and lines.count("") == 1
    assert "a" * 300 + " …" in str(Readings([Reading("a" * 301, "", (), ())]))


def test_report(base, adapter):
    said = []
    report = reading_report(
        {"base": base, "tuned": adapter[0]},
        PAIRS,
        2,
        {"commit": "abc"},
        load=LOAD,
        say=said.append,
        samples=1,
        max_new_tokens=4,
        top=2,
    )
    assert json.loads(json.dumps(report))["models"].keys() == {"base", "tuned"} and len(said) == 2
    assert report["counterparts"] == [
        text for pair in PAIRS[:2] for text in (pair.positive, pair.query)
    ]
    assert (
        report["about"]["commit"] == "abc"
        and report["about"]["versions"]["torch"] == torch.__version__
    )
    assert report["pairs"]["number"] == 3 and report["settings"]["max_new_tokens"] == 4
    for model in report["models"].values():
        assert model["settings"]["attention"] == "causal"
        assert [one["text"] for one in model["readings"]] == [
            text for pair in PAIRS[:2] for text in (pair.query, pair.positive)
        ]
        assert all(
            len(one["samples"]) == 1 and len(one["next_tokens"]) == 2 for one in model["readings"]
        )
    assert str(base) not in json.dumps(report), "a report must not name a folder of the machine"
    with pytest.raises(InputError, match="no-such-model"):
        reading_report({"a": "no-such-model"}, PAIRS, 1)
