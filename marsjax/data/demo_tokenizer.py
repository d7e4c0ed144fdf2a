"""The tokenizer of the embedded demo model: small, byte-level, in the manner of Qwen2.5.

Digits stand alone, names are whole, any text can be written (all 256 bytes are tokens), the conversation format is
ChatML. It is built from the generator's own text and is the same in every process.
"""

from functools import cache
from itertools import chain

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from marsjax.data.problems import CITIES, PEOPLE, problem
from marsjax.text.chat import PLAIN_CHAT_TEMPLATE

VOCABULARY_SIZE = 640
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SAMPLE = 4000  # problems the merges are counted on; more does not change which words matter

# Words carry their leading space; a digit is always a piece of its own.
_PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s"


@cache
def _trained(vocabulary_size: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - len(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    drawn = (problem(0, i) for i in range(_SAMPLE))
    texts = (f"user\n{p.question}\nassistant\n{p.answer}" for p in drawn)
    names = [" " + " ".join(PEOPLE + CITIES)] * _SAMPLE  # often enough that every name is one token
    tokenizer.train_from_iterator(chain(texts, names), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    return tokenizer.to_str()


def demo_tokenizer(vocabulary_size: int = VOCABULARY_SIZE) -> PreTrainedTokenizerFast:
    """A fresh copy of the demo's tokenizer; its special tokens hold the last three ids, as in Qwen2.5."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(vocabulary_size)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=PLAIN_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
