"""What became of a source's conversations: counted while they are tokenised, kept as statistics.json, shown."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from marsjax.data.identity import Identity
from marsjax.data.row_sets import check_supervised
from marsjax.data.rows import RowMaker, RowStats
from marsjax.data.sources import DataError
from marsjax.data.tokenise import SHOWN, UNUSABLE, Chunk, open_counted, tokenised

FORMAT, VERSION = "marsjax token rows", 1
STATISTICS = "statistics.json"
_REASONS = 50  # distinct reasons counted; a source can be wrong in more ways than anybody reads


@dataclass
class Survey:
    """What became of a source's conversations; built by adding chunks."""

    source: str
    identity: Identity
    stats: RowStats = field(default_factory=RowStats)
    unusable: list[str] = field(default_factory=list)
    fingerprint: int = 0  # as RowSet.fingerprint: crc32 of the rows' ids
    longest: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * 16)  # rows by tokens, in equal parts of the length

    def add(self, chunk: Chunk) -> None:
        self.stats.add(chunk.stats)
        self.unusable += chunk.unusable[: SHOWN - len(self.unusable)]
        if len(self.stats.dropped) > _REASONS:
            self._merge_reasons()
        self.fingerprint = crc32(chunk.ids.tobytes(), self.fingerprint)
        tokens = chunk.sizes.tokens
        self.longest = max(self.longest, int(tokens.max(initial=0)))
        parts = (tokens.astype(np.int64) - 1) * len(self.histogram) // self.identity.length
        for part, count in zip(*np.unique(parts, return_counts=True), strict=True):
            self.histogram[part] += int(count)

    def _merge_reasons(self) -> None:
        dropped, other = self.stats.dropped, UNUSABLE + "other reasons"
        known = (reason for reason in dropped if reason.startswith(UNUSABLE) and reason != other)
        for reason in sorted(known, key=dropped.__getitem__)[: len(dropped) - _REASONS]:
            dropped[other] += dropped.pop(reason)


def survey(source: str, maker: RowMaker, num_workers: int | None = None) -> Survey:
    """What becomes of all conversations of a source. Raises DataError, with counts, if nothing is supervised."""
    conversations = open_counted(source)
    found = Survey(source, Identity.of(maker))
    for chunk in tokenised(conversations, maker, num_workers):
        found.add(chunk)
    check_supervised(source, found.stats, maker.length)
    return found


def to_json(found: Survey, shards: list[int] | None = None) -> dict[str, Any]:
    """What statistics.json holds; JSON can hold it."""
    stats = found.stats
    tree = {
        "format": FORMAT,
        "version": VERSION,
        "source": found.source,
        **asdict(found.identity),
        "conversations": stats.conversations,
        "rows": stats.rows,
        "tokens": stats.tokens,
        "supervised_tokens": stats.supervised_tokens,
        "supervised_share": stats.supervised_tokens / max(stats.tokens, 1),
        "cut": stats.cut,
        "dropped": dict(sorted(stats.dropped.items())),
        "unusable": found.unusable,
        "longest": found.longest,
        "histogram": found.histogram,
        "fingerprint": found.fingerprint,
    }
    return tree if shards is None else {**tree, "shards": shards}


def read_statistics(directory: Path) -> Survey:
    """The survey of a built directory. Raises DataError if it is none, or of a later version."""
    try:
        tree = json.loads((directory / STATISTICS).read_text(encoding="utf-8"))
        if tree["format"] != FORMAT or tree["version"] > VERSION:
            raise DataError(
                f"{directory} holds {tree['format']!r} version {tree['version']}; this marsjax reads {FORMAT!r} up to "
                f"version {VERSION}"
            )
        counts = {name: int(tree[name]) for name in ("conversations", "rows", "tokens", "supervised_tokens", "cut")}
        stats = RowStats(**counts, dropped=Counter(tree["dropped"]))
        identity = Identity(**{name: tree[name] for name in Identity.__dataclass_fields__})
        rest = (tree[name] for name in ("unusable", "fingerprint", "longest", "histogram"))
        return Survey(tree["source"], identity, stats, *rest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{directory} is not what marsjax data build writes: {STATISTICS}: {error!r}") from error


def describe(found: Survey) -> str:
    """The survey for people, a few lines."""
    stats = found.stats
    share = 100 * stats.supervised_tokens / max(stats.tokens, 1)
    lines = [
        f"{found.source}, at most {found.identity.length} tokens a row",
        f"  {stats.conversations} conversations, {stats.rows} rows, {stats.cut} answers cut",
        f"  {stats.tokens} tokens, {stats.supervised_tokens} supervised ({share:.1f} %); "
        f"{stats.tokens / max(stats.rows, 1):.0f} a row, the longest {found.longest}",
    ]
    lines += [f"  {count} dropped: {reason}" for reason, count in stats.dropped.most_common()]
    lines += [f"    {text}" for text in found.unusable]
    most, parts = max(found.histogram), len(found.histogram)
    for i, count in enumerate(found.histogram):
        first, last = (-(-k * found.identity.length // parts) for k in (i, i + 1))
        if first < last:
            lines.append(f"  {first + 1:6d} to {last:6d} tokens  {count:9d} {'#' * round(40 * count / max(most, 1))}")
    return "\n".join(lines)
