import json

import numpy as np
import pytest

from marsjax.parallel.sharding import make_mesh
from marsjax.weights import CheckpointError, GenerationDefaults, Pretrained, convert, load, save

from .conftest import GOLDEN


@pytest.fixture
def source(tmp_path, random_model, word_tokenizer):
    """A model of `rows` embedding rows with a tokenizer of 37 tokens."""

    def make(rows, tokens=37, **fields):
        path = tmp_path / f"source{rows}"
        save(Pretrained(random_model(vocab_size=rows, **fields), word_tokenizer(tokens),
                        GenerationDefaults((1,), 0)), path)  # fmt: skip
        return path

    return make


def tables(pretrained):
    model = pretrained.model
    found = {"embedding": np.asarray(model.embed_table.embedding[...])}
    if model.head is not None:
        found["head"] = np.asarray(model.head.kernel[...]).T
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_a_spare_row(source, tied):
    path = source(40, tie_embeddings=tied)
    plain, masked = load(path), load(path, with_mask_token=True)
    assert (plain.mask_id, masked.mask_id) == (None, 37)
    assert masked.model.config.vocab_size == 40
    assert masked.tokenizer.convert_tokens_to_ids("<|mask|>") == 37
    assert tables(masked).keys() == ({"embedding"} if tied else {"embedding", "head"})
    for name, before in tables(plain).items():
        after = tables(masked)[name]
        np.testing.assert_allclose(after[37], before[:37].mean(0), rtol=1e-5, atol=1e-8)
        np.testing.assert_array_equal(np.delete(after, 37, 0), np.delete(before, 37, 0))


@pytest.mark.parametrize("mesh", [False, True])
@pytest.mark.parametrize("layout", ["list", "stacked"])
def test_no_row_left(source, layout, mesh):
    path = source(40, tokens=40)
    options = {"mesh": make_mesh(fsdp=1, tensor=1)} if mesh else {}
    plain, masked = load(path), load(path, with_mask_token=True, layout=layout, **options)
    assert (masked.mask_id, masked.model.config.vocab_size) == (40, 128)
    for name, before in tables(plain).items():
        after = tables(masked)[name]
        np.testing.assert_array_equal(after[:40], before)
        np.testing.assert_allclose(after[40:], np.tile(before.mean(0), (88, 1)), rtol=1e-5, atol=1e-8)


def test_exported_and_found_again(source, tmp_path, arrays):
    masked = load(source(40, tokens=40), with_mask_token=True)
    out = save(masked, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert (config["marsjax"], config["vocab_size"]) == ({"mask_token_id": 40}, 128)
    for again in (load(out), load(out, with_mask_token=True)):
        assert again.mask_id == 40
        for path, value in arrays(again.model).items():
            np.testing.assert_array_equal(value, arrays(masked.model)[path])
    config.pop("marsjax")
    (out / "config.json").write_text(json.dumps(config))
    assert load(out).mask_id == 40  # the tokenizer knows it too


def test_named_in_the_config_without_a_tokenizer(checkpoint, arrays):
    copy = checkpoint()
    copy.edit(marsjax={"mask_token_id": 65})
    masked = load(copy.path, with_mask_token=True)
    assert masked.mask_id == 65
    for path, value in arrays(load(GOLDEN / "llama").model).items():
        np.testing.assert_array_equal(value, arrays(masked.model)[path])


@pytest.mark.parametrize("value", [96, -1, "65"])
def test_a_mask_outside_the_table(checkpoint, value):
    copy = checkpoint()
    copy.edit(marsjax={"mask_token_id": value})
    with pytest.raises(CheckpointError, match=r"mask token has id .*96 rows"):
        load(copy.path)


def test_neither_tokenizer_nor_config():
    with pytest.raises(CheckpointError, match=r"has no tokenizer.*mask_token_id"):
        load(GOLDEN / "llama", with_mask_token=True)


def test_convert_with_a_mask_token(source, tmp_path):
    assert load(convert(source(40), tmp_path / "out", mask_token=True)).mask_id == 37
