"""Text that grows token by token: whole characters only, and nothing behind a stop string."""

import codecs
import json
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerFast


def _byte_characters() -> dict[str, int]:
    """The inverse of byte-level BPE's alphabet: printable Latin-1 stands for itself, the rest for U+0100 upward."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_characters()


class Detokenizer:
    """Turns the ids of one answer into text as they come, at a cost linear in their number.

    All increments and `finish()` joined are the tokenizer's decoding of all ids. A character whose bytes are spread
    over tokens comes with its last byte; bytes that are no UTF-8 come as U+FFFD, as in a full decoding. Special tokens
    are left out unless asked for; ids the tokenizer does not know have no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, skip_special_tokens: bool = True):
        self._backend = tokenizer.backend_tokenizer
        decoder = self._backend.decoder
        description = json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
        kinds = [d["type"] for d in description.get("decoders", [description])]
        if [kind for kind in kinds if kind != "Fuse"] != ["ByteLevel"]:
            raise ValueError(
                f"cannot stream text through decoder {kinds}: only byte-level tokenizers (as of Qwen2.5, Qwen3, "
                "Llama 3 and SmolLM2) are supported"
            )
        added = self._backend.get_added_tokens_decoder() if skip_special_tokens else {}
        self._skipped = frozenset(i for i, token in added.items() if token.special)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that is final once these ids have come."""
        return self._utf8.decode(b"".join(self._bytes_of(int(i)) for i in ids))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _bytes_of(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTES[character] for character in token)
        except KeyError:  # an added token, written in plain text
            return token.encode()


class StopStrings:
    """Finds the first stop string in text that arrives in pieces, and holds back what may yet become one.

    The stop that is complete first wins (of two complete at the same character, the longer): so where a text ends does
    not depend on how it was cut into pieces. Only text that is fed counts: feed the answer, never the prompt.
    """

    def __init__(self, stops: str | Sequence[str]):
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in self.stops:
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"a stop string must be a non-empty string, but one of {list(self.stops)!r} is not")
        self.stopped: str | None = None  # the stop string that was met
        self._held = ""

    def push(self, text: str) -> str:
        """The part of the text that may be shown now. Nothing any more once `stopped` is set."""
        if self.stopped is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.stopped = min(found)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that was held back and became no stop string."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
