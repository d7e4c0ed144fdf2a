import hashlib
import subprocess
import sys

from marsjax.data.demo_tokenizer import demo_tokenizer
from marsjax.text.chat import turn_end_id


def test_same_in_every_process():
    code = (
        "import hashlib; from marsjax.data.demo_tokenizer import demo_tokenizer as d;"
        "print(hashlib.sha256(d().backend_tokenizer.to_str().encode()).hexdigest())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert said == hashlib.sha256(demo_tokenizer().backend_tokenizer.to_str().encode()).hexdigest()


def test_any_text_comes_back():
    tokenizer = demo_tokenizer()
    for text in ("Ünïcödé 漢字 🙂\t\r\n x", "a\x00b", "   ", "\n\n\n", "1234567890", "it's"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_stand_alone_and_special_tokens_come_last():
    tokenizer = demo_tokenizer()
    assert len(tokenizer) == 640
    assert tokenizer.convert_ids_to_tokens([637, 638, 639]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (637, 639)
    assert turn_end_id(tokenizer) == 639
    assert not [t for t in tokenizer.get_vocab() if any(c.isdigit() for c in t) and len(t) > 1]


def test_copies_are_independent():
    first = demo_tokenizer()
    first.add_tokens(["<|extra|>"])
    assert len(demo_tokenizer()) == 640


def test_survives_saving(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = demo_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "How many are 3 pens?"}]
    for t in (tokenizer, loaded):
        assert t.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
            "<|im_start|>user\nHow many are 3 pens?<|im_end|>\n<|im_start|>assistant\n"
        )
    assert loaded("7 pens 漢")["input_ids"] == tokenizer("7 pens 漢")["input_ids"]
    assert (loaded.pad_token_id, loaded.eos_token_id) == (637, 639)
