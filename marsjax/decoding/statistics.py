"""What an engine has done so far."""

import collections
import dataclasses
from collections.abc import Mapping


def accepted_by_depth(runs: Mapping[int, int]) -> list[float]:
    """Share of forwards that accepted at least 1, 2, ... tokens beyond the first; `runs[n]` gave n tokens."""
    total, deepest = sum(runs.values()), max(runs, default=1)
    return [sum(n for size, n in runs.items() if size > depth) / total for depth in range(1, deepest)]


@dataclasses.dataclass
class Statistics:
    """Sums over everything an engine has done. Tokens are returned ones, seconds exclude compilation.

    Attributes:
      requests, cancelled, failed: requests that ended, and those of them that were cancelled or failed.
      prompt_tokens, new_tokens: of ended requests.
      forwards: of ended requests, prefill apart; a request's count ends with its last returned token.
      draft_forwards: of the draft model, for these.
      runs: how many forwards returned n tokens, by n: `runs[n]`.
      steps: decode steps of the engine, each one forward for all its lanes.
      slots, head_rows: slots fed and rows of logits computed by those steps, idle lanes included.
      decode_seconds, prefill_seconds: inside compiled steps.
      compile_seconds: first calls of programs. host_seconds: the rest of the time spent in `turn`.
    """

    requests: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    forwards: int = 0
    draft_forwards: int = 0
    runs: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    steps: int = 0
    slots: int = 0
    head_rows: int = 0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    compile_seconds: float = 0.0
    host_seconds: float = 0.0

    @property
    def tokens_per_forward(self) -> float:
        return self.new_tokens / max(1, self.forwards)

    @property
    def accepted_by_depth(self) -> list[float]:
        """Of `runs`."""
        return accepted_by_depth(self.runs)
