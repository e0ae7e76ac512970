"""What several tests need."""

import pytest

from anchor_embedding.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny base model on disk."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer("smollm2").save_pretrained(folder)
    return folder
