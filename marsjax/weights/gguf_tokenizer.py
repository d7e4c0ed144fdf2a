"""The tokenizer a GGUF file describes: byte-level BPE, rebuilt so that its ids equal the model's own."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from marsjax.models import UnsupportedModel
from marsjax.weights.tensors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

# How the text is cut before merges apply, as the models' own tokenizer.json says. {} is the length of a run of digits.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    "gpt2": _gpt2,
    "default": _gpt2,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()]),
    "qwen2": lambda: _split(_WORDS.format("")),
    "deepseek-r1-qwen": lambda: _split(_WORDS.format("")),
    "llama-bpe": lambda: _split(_WORDS.format("{1,3}")),
    "llama3": lambda: _split(_WORDS.format("{1,3}")),
    "llama-v3": lambda: _split(_WORDS.format("{1,3}")),
}


def build_tokenizer(metadata: dict[str, Any], path: Path) -> PreTrainedTokenizerFast | None:
    """A fast tokenizer with special tokens and chat template; None where the file describes none.

    Raises UnsupportedModel for tokenizers other than byte-level BPE, or cut in a way that is not known.
    """

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    tokens = get("tokens")
    if tokens is None or get("model") in (None, "none"):
        return None
    if get("model") != "gpt2":
        kind = {"llama": "SentencePiece"}.get(get("model"), "")
        raise UnsupportedModel(
            f"{path}: tokenizer model {get('model')!r}{f' ({kind})' if kind else ''} is not supported; supported is"
            " byte-level BPE ('gpt2'); use the model's Hugging Face directory instead"
        )
    pre = get("pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{path}: pre-tokenizer {pre!r} is not known; known are {', '.join(sorted(PRE_TOKENIZERS))};"
            " use the model's Hugging Face directory instead"
        )
    types = get("token_type", [NORMAL] * len(tokens))
    while tokens and types[len(tokens) - 1] == UNUSED:  # names for spare rows of the embedding, not tokens
        tokens = tokens[:-1]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise CheckpointError(f"{path}: token {twice!r} occurs twice in the vocabulary")
    merges = [tuple(merge.split(" ")) for merge in get("merges", [])]
    llama3 = pre.startswith("llama")  # Llama 3 looks a whole word up before merging
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=llama3))
    if "qwen" in pre:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(  # matched whole in a text; they have ids already, which stay
        [
            AddedToken(token, normalized=False, special=kind != USER_DEFINED)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    tokenizer.post_processor = _post_processor(get, tokens, llama3)
    ids = {"bos": get("bos_token_id"), "eos": get("eos_token_id"),
           "pad": get("padding_token_id"), "unk": get("unknown_token_id")}  # fmt: skip
    named = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=metadata.get(f"{metadata.get('general.architecture')}.context_length"),
        **named,
    )
    fast.chat_template = metadata.get("tokenizer.chat_template")
    return fast


def _post_processor(get: Any, tokens: list[str], llama3: bool) -> Any:
    byte_level = processors.ByteLevel(trim_offsets=False)
    bos = get("bos_token_id")
    if bos is None or not get("add_bos_token", llama3):
        return byte_level
    start = processors.TemplateProcessing(
        single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B", special_tokens=[(tokens[bos], bos)]
    )
    return processors.Sequence([byte_level, start])
