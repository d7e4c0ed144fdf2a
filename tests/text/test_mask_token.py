import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from marsjax.text.mask_token import MASK_TEXT, MaskPlan, ensure_mask_token, find_mask_id


def table(rows):
    return SimpleNamespace(vocab_size=rows)


def with_holes(tokenizer, shift=7):
    """The same tokenizer, its last merged tokens moved up so that ids are missing in between."""
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = description["model"]["vocab"]
    top = max(vocabulary.values())
    for text, number in vocabulary.items():
        if number > top - 5:
            vocabulary[text] = number + shift
    for token in description["added_tokens"]:
        vocabulary[token["content"]] = token["id"] = token["id"] + shift
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(description)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=tokenizer.chat_template,
    )


def test_takes_the_first_spare_row(tokenizer):
    size = len(tokenizer)
    before = dict(tokenizer.special_tokens_map), tokenizer("the <|im_end|>")["input_ids"]
    assert find_mask_id(tokenizer) is None
    assert ensure_mask_token(tokenizer, table(size + 40)) == MaskPlan(size, size + 40, added=True)
    assert find_mask_id(tokenizer) == size == tokenizer.convert_tokens_to_ids(MASK_TEXT)
    assert ensure_mask_token(tokenizer, table(size + 40)) == MaskPlan(size, size + 40, added=False)
    assert (dict(tokenizer.special_tokens_map), tokenizer("the <|im_end|>")["input_ids"]) == before


@pytest.mark.parametrize("spare", [0, 1])
def test_a_full_table_grows_to_the_next_multiple_of_128(tokenizer, spare):
    size = len(tokenizer)
    plan = ensure_mask_token(tokenizer, table(size + spare))
    assert plan.mask_id == size
    assert plan.new_vocab_size == (size + 1 if spare else -(-(size + 1) // 128) * 128)


def test_growth_when_the_table_is_a_full_multiple(tokenizer):
    tokenizer.add_tokens([f"<extra {i}>" for i in range(-len(tokenizer) % 128)])
    rows = len(tokenizer)
    assert rows % 128 == 0
    assert ensure_mask_token(tokenizer, table(rows)) == MaskPlan(rows, rows + 128, added=True)


def test_is_one_special_token_in_text(tokenizer):
    mask = ensure_mask_token(tokenizer, table(400)).mask_id
    ids = tokenizer(f"the{MASK_TEXT}end")["input_ids"]
    assert ids.count(mask) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "theend"


def test_is_found_again_after_saving(tokenizer, tmp_path):
    plan = ensure_mask_token(tokenizer, table(400))
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert find_mask_id(loaded) == plan.mask_id
    assert ensure_mask_token(loaded, table(400)) == MaskPlan(plan.mask_id, 400, added=False)
    assert loaded.backend_tokenizer.get_added_tokens_decoder()[plan.mask_id].special


def test_ids_with_holes(tokenizer, tmp_path):
    holes = with_holes(tokenizer)
    highest = max(holes.get_vocab().values())
    assert highest >= len(holes)
    text = "the answer is 7 <|im_end|> <tool call> größe"
    ids, vocabulary = holes(text)["input_ids"], holes.get_vocab()
    plan = ensure_mask_token(holes, table(highest + 2))
    assert plan == MaskPlan(highest + 1, highest + 2, added=True)
    holes.save_pretrained(tmp_path)
    for t in (holes, AutoTokenizer.from_pretrained(tmp_path)):
        assert find_mask_id(t) == highest + 1
        assert t(text)["input_ids"] == ids
        assert t.get_vocab() == {**vocabulary, MASK_TEXT: highest + 1}
        assert t(f"the{MASK_TEXT}")["input_ids"][-1] == highest + 1
        assert t.decode([highest + 1], skip_special_tokens=True) == ""


def test_a_tokenizer_larger_than_the_table_is_refused(tokenizer):
    highest = len(tokenizer) - 1
    with pytest.raises(ValueError, match=rf"ids up to {highest}, but the embedding table has only 300 rows"):
        ensure_mask_token(tokenizer, table(300))
