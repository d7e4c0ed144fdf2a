import sys
from pathlib import Path

import jax
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))  # for decoding_helpers and decoding_reference


@pytest.fixture(scope="session")
def bytes_tokenizer():
    """Every byte a token, ids 0..255, then <|im_end|> (256) and <|mask|> (257)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>", "<|mask|>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


@pytest.fixture
def compilations():
    """A list that grows by one for every program XLA compiles, of whatever function."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)
