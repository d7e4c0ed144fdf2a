"""What generation returns."""

import dataclasses
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclasses.dataclass(frozen=True)
class Result:
    """One finished answer. Every count is of returned tokens.

    Attributes:
      text: the answer without special tokens, up to a stop string; None without a tokenizer.
      ids: the answer's tokens, an end token included. With a stop string: the tokens that hold the text before it.
      finish_reason: "stop" (end token or stop string), "length" or "cancelled".
      stop: the end token's id or the stop string; None otherwise.
      chunks: tokens accepted by each forward, in order; they sum to len(ids).
      forwards: forward passes up to the one that gave the last returned token, prefill apart. More than there are
        chunks where the row waited for others ("block") or filled a later place first ("block_diffusion").
      seed: what the row's samples were drawn with; generating with it again gives the same answer.
      draft_forwards: forward passes of the draft model, if there was one.
      seconds: wall time of the decode steps the request took part in, prefill and compilation apart.
      prefill_seconds: wall time of committing its prompt and those admitted with it.
    """

    text: str | None
    ids: list[int]
    prompt_ids: list[int]
    finish_reason: FinishReason
    stop: int | str | None
    chunks: list[int]
    forwards: int
    seed: int
    draft_forwards: int
    seconds: float
    prefill_seconds: float

    @property
    def tokens_per_forward(self) -> float:
        return len(self.ids) / max(1, self.forwards)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {"tokens_per_forward": self.tokens_per_forward}


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one forward added to a streamed answer: final text only, so all chunks' texts joined are the result's.

    `ids` are those whose text is final too: where a stop string may have begun, ids wait with their text for the
    chunk that decides. `result` is set on the last chunk.
    """

    text: str
    ids: list[int]
    result: Result | None = None
