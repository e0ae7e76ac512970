"""Encoding from several threads at once gives the vectors of one thread and changes no setting of
the process; a text tokenizer has a tokenizer of its own.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoTokenizer

from anchor_embedding.common.tiny import tiny_model, tiny_tokenizer
from anchor_embedding.model.decoder import CausalDecoder
from anchor_embedding.model.packing import ATTENTION, pack
from anchor_embedding.model.text import TextTokenizer

TEXTS = [[5, 6, 7, 2], [9, 2], [*range(20, 90), 2]]
DTYPES = (torch.float32, torch.bfloat16)


def decoder_in(dtype):
    model = tiny_model("llama")
    model.set_attn_implementation(ATTENTION)
    return CausalDecoder(model, dtype).eval()


def process_wide():
    """The settings of the process that affect a matrix product."""
    own = torch.backends.mkldnn
    return (
        own.matmul.fp32_precision,
        own.fp32_precision,
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
    )


@pytest.mark.parametrize("gradient", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_eight_threads_encode_in_both_dtypes(gradient):
    decoders = {dtype: decoder_in(dtype) for dtype in DTYPES}
    before = process_wide()
    batch = pack(TEXTS)

    def encode(dtype):
        with torch.set_grad_enabled(gradient):
            vectors = decoders[dtype](CausalDecoder.encode, batch)
        if gradient:
            return torch.autograd.grad(vectors.square().sum(), decoders[dtype].head.weight)[0]
        return vectors

    expected = {dtype: encode(dtype) for dtype in DTYPES}
    work = [dtype for _ in range(100) for dtype in DTYPES]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(encode, work))
    assert all(
        torch.equal(vectors, expected[dtype]) for vectors, dtype in zip(found, work, strict=True)
    )
    assert process_wide() == before


def test_texts_are_tokenised_without_a_change_to_the_tokenizer_that_threads_share():
    tokenizer = tiny_tokenizer("qwen2")
    backend = tokenizer.backend_tokenizer
    for switch in (False, True):
        backend.encode_special_tokens = switch
        text_tokenizer = TextTokenizer(tokenizer)
        (text,) = text_tokenizer(["a<|im_end|>b"])
        assert backend.encode_special_tokens is switch
        assert text.ids.count(text_tokenizer.eos_id) == 1


def test_a_token_added_to_the_tokenizer_of_a_model_is_read_and_saved(tmp_path):
    given = tiny_tokenizer("qwen2")
    text_tokenizer = TextTokenizer(given)
    before = len(given)
    text_tokenizer.tokenizer.add_tokens(["CRISPR-Cas9"])
    (text,) = text_tokenizer(["how does CRISPR-Cas9 work"])
    assert before in text.ids and len(given) == before
    text_tokenizer.tokenizer.save_pretrained(tmp_path)
    saved = TextTokenizer(AutoTokenizer.from_pretrained(tmp_path), text_tokenizer.template)
    assert saved([text.text])[0].ids == text.ids
