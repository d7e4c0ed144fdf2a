"""Any source → token rows, in order and in bounded memory, by several processes if asked."""

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from threading import Thread

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from marsjax.data.row_sets import Sizes, sizes_of
from marsjax.data.rows import Row, RowMaker, RowStats
from marsjax.data.sources import BadRecord, DataError, ProblemSource, open_source
from marsjax.data.token_records import encode_row
from marsjax.text.chat import Message

CHUNK = 128  # conversations a process is given at a time
SHOWN = 10  # unusable records shown in full
_WORTH_STARTING = 10_000  # conversations
UNUSABLE = "unusable: "


@dataclass
class Chunk:
    """The rows of some conversations, each as a record's bytes."""

    stats: RowStats
    unusable: list[str]
    records: list[bytes]
    ids: np.ndarray  # of all rows, one behind another
    sizes: Sizes


def open_counted(source: str) -> Sequence[list[Message]]:
    """A source that has an end. Raises DataError for one that has none."""
    conversations = open_source(source, in_full=False)
    if isinstance(conversations, ProblemSource) and not conversations.counted:
        raise DataError(f"{source} has no end; give it a count, as in {source},count=10000")
    return conversations


def tokenised(
    conversations: Sequence[list[Message]], maker: RowMaker, num_workers: int | None = None, chunk: int = CHUNK
) -> Iterator[Chunk]:
    """The rows of `chunk` conversations after another, in their order; a few chunks a process are in memory at most.

    A record that is no conversation, or that the chat template refuses, is counted as dropped with its reason.
    `num_workers` 0 works in this process; None starts one a core where that is worth it. Shows its progress on a
    terminal.
    """
    if num_workers is None:
        num_workers = 0 if len(conversations) < _WORTH_STARTING else min(os.cpu_count() or 1, 16)
    if num_workers < 0:
        raise DataError(f"num_workers must be at least 0, got {num_workers}")
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("conversations", total=len(conversations))
        for made in _tokenised(_chunks(conversations, chunk), maker, num_workers):
            yield made
            progress.advance(task, made.stats.conversations)


def _tokenised(chunks: "Iterator[tuple[int, _Part]]", maker: RowMaker, num_workers: int) -> Iterator[Chunk]:
    if not num_workers:
        for start, part in chunks:
            yield _make(maker, start, part)
        return
    # Spawned, not forked: a fork copies the threads' locks of JAX and of the tokenizer as they are.
    with ProcessPoolExecutor(num_workers, get_context("spawn"), initializer=_begin, initargs=(maker,)) as pool:
        waiting: deque[Future[Chunk]] = deque()
        try:
            for start, part in chunks:
                waiting.append(pool.submit(_work, start, part))
                if len(waiting) > 2 * num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


_Part = list[list[Message] | str]


def _chunks(conversations: Sequence[list[Message]], chunk: int) -> Iterator[tuple[int, _Part]]:
    """Index of the first, and the conversations; in place of a bad record the reason."""
    for start in range(0, len(conversations), chunk):
        part: _Part = []
        for index in range(start, min(start + chunk, len(conversations))):
            try:
                part.append(conversations[index])
            except BadRecord as error:
                part.append(error.reason)
        yield start, part


def _make(maker: RowMaker, start: int, part: _Part) -> Chunk:
    stats = RowStats()
    unusable: list[str] = []
    rows: list[Row] = []
    for index, messages in enumerate(part, start=start):
        before = stats.conversations
        try:
            if isinstance(messages, str):
                raise ValueError(messages)
            rows += maker(messages, stats)
        except ValueError as error:  # the chat template refuses it
            stats.conversations = before + 1
            stats.dropped[UNUSABLE + re.sub(r"\d+", "N", str(error))[:80]] += 1
            if len(unusable) < SHOWN:
                unusable.append(f"record {index}: {error}")
    ids = np.concatenate([row.ids for row in rows]) if rows else np.zeros(0, np.int32)
    return Chunk(stats, unusable, [encode_row(row) for row in rows], ids, sizes_of(rows))


_maker: RowMaker | None = None  # of a worker process


def _begin(maker: RowMaker) -> None:
    global _maker
    _maker = maker
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A process that waits for work does not notice that the one that would give it was killed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(start: int, part: _Part) -> Chunk:
    assert _maker is not None
    return _make(_maker, start, part)
