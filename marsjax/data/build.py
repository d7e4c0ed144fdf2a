"""`marsjax data build`: any source, tokenised once, as sharded ArrayRecord files that tensorflow-datasets reads too.

A built directory holds
    rows-train.array_record-00000-of-00004 …   token rows as tf.train.Example (marsjax.data.token_records)
    dataset_info.json, features.json           what `tfds.builder_from_directory` needs
    sizes.npz                                  a marsjax.data.row_sets.Sizes: what planning must know of every row
    statistics.json                            what became of the conversations, and what the rows depend on
"""

import errno
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from marsjax.data.identity import Identity
from marsjax.data.row_sets import Sizes, check_supervised
from marsjax.data.rows import RowMaker
from marsjax.data.sources import DataError, missing_extra
from marsjax.data.statistics import STATISTICS, Survey, to_json
from marsjax.data.tokenise import CHUNK, open_counted, tokenised

SIZES = "sizes.npz"
_PER_SHARD = 50_000  # conversations a shard, unless asked otherwise
_FORMAT_OPTIONS = "group_size:1"  # one record a compressed group, for random access


def build(
    source: str, out: str | Path, maker: RowMaker, *, shards: int | None = None, num_workers: int | None = None
) -> Survey:
    """Writes the rows of a source to `out`, which must not exist, all at once at the end.

    Needs the `data` extra. Bad records are dropped and counted. Raises DataError, with counts, if nothing is
    supervised, and OSError if the disk is full; neither leaves anything behind.
    """
    target = Path(out).expanduser()
    if target.exists():
        raise DataError(f"{target} exists; remove it, or build to another place")
    try:
        import tensorflow_datasets  # noqa: F401 (asked for before the work, not behind it)
    except ImportError as error:
        raise missing_extra("marsjax data build", "tensorflow-datasets") from error
    conversations = open_counted(source)
    if shards is None:
        shards = -(-len(conversations) // _PER_SHARD)
    if not 1 <= shards <= len(conversations):
        raise DataError(f"shards must be 1 to the {len(conversations)} conversations of {source}, got {shards}")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.building-", dir=target.parent))
    try:
        found = Survey(source, Identity.of(maker))
        chunk = min(CHUNK, len(conversations) // shards)
        writer = _Shards(work, shards, -(-len(conversations) // chunk))
        for made in tokenised(conversations, maker, num_workers, chunk):
            found.add(made)
            writer.add(made.records, made.sizes)
        check_supervised(source, found.stats, maker.length)
        lengths = writer.finish()
        _write_metadata(work, lengths)
        (work / STATISTICS).write_text(json.dumps(to_json(found, lengths), indent=1, ensure_ascii=False) + "\n")
        work.chmod(0o755)  # mkdtemp's own is for the owner alone
        work.rename(target)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(work, error) from error
        raise
    return found


class _Shards:
    """Writes chunks to shards of about as many chunks each, and gathers the sizes."""

    def __init__(self, directory: Path, shards: int, chunks: int):
        self._directory, self._shards, self._chunks = directory, shards, chunks
        self._seen = 0
        self._writer: Any = None
        self._path = directory
        self._written: list[tuple[Path, int]] = []
        self._sizes: list[Sizes] = []

    def add(self, records: list[bytes], sizes: Sizes) -> None:
        shard = self._seen * self._shards // self._chunks
        self._seen += 1
        if shard == len(self._written):
            self._close()
            self._path = self._directory / f"part-{shard:05d}"
            self._writer = ArrayRecordWriter(str(self._path), _FORMAT_OPTIONS)
            self._written.append((self._path, 0))
        try:
            for record in records:
                self._writer.write(record)
        except RuntimeError as error:
            raise _full(self._path, error) from error
        path, count = self._written[-1]
        self._written[-1] = (path, count + len(records))
        self._sizes.append(sizes)

    def finish(self) -> list[int]:
        """Closes and names the shards (an empty one is left out), writes the sizes. Rows of each."""
        self._close()
        filled = [(path, count) for path, count in self._written if count]
        for path, count in self._written:
            if not count:
                path.unlink()
        for i, (path, count) in enumerate(filled):
            reader = ArrayRecordReader(str(path))
            if not reader.ok() or reader.num_records() != count:
                raise OSError(
                    f"{path} holds {reader.num_records()} of the {count} rows written to it; is the disk full?"
                )
            reader.close()
            path.rename(self._directory / f"rows-train.array_record-{i:05d}-of-{len(filled):05d}")
        first_span = np.cumsum([0, *(len(s.span_starts) for s in self._sizes)])
        offsets = [s.span_offsets[:-1] + n for s, n in zip(self._sizes, first_span, strict=False)]
        np.savez(
            self._directory / SIZES,
            tokens=np.concatenate([s.tokens for s in self._sizes]),
            span_starts=np.concatenate([s.span_starts for s in self._sizes]),
            span_ends=np.concatenate([s.span_ends for s in self._sizes]),
            span_offsets=np.concatenate([*offsets, first_span[-1:]]),
        )
        return [count for _, count in filled]

    def _close(self) -> None:
        if self._writer is not None:
            try:
                self._writer.close()
            except RuntimeError as error:
                raise _full(self._path, error) from error


def _full(path: Path, error: Exception) -> OSError:
    return OSError(f"writing {path} failed: {error}; nothing was kept, free some space and build again")


def _write_metadata(directory: Path, lengths: list[int]) -> None:
    """dataset_info.json and features.json, written by tensorflow-datasets (which needs no TensorFlow for it)."""
    import tensorflow_datasets as tfds
    from etils import epath

    integers = tfds.features.Tensor(shape=(None,), dtype=np.int32)
    features = {"ids": integers, "span_starts": integers, "span_ends": integers, "complete": np.bool_}
    files = tfds.core.ShardedFileTemplate(
        data_dir=epath.Path(directory), dataset_name="rows", split="train", filetype_suffix="array_record"
    )
    size = sum(path.stat().st_size for path in directory.glob("rows-train.*"))
    tfds.folder_dataset.write_metadata(
        data_dir=directory,
        features=tfds.features.FeaturesDict(features),
        split_infos=[tfds.core.SplitInfo("train", lengths, num_bytes=size, filename_template=files)],
        filename_template=files,
        check_data=False,
    )
