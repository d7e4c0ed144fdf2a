"""`arrayrecord:PATH`: conversations as JSON in ArrayRecord files, read by index."""

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordReader

from marsjax.data.sources import DataError, Records


class ArrayRecords(Records):
    """Records of one file, of those a pattern (`*`, `?`, `[...]`) names, in the order of their names, or of a
    directory's `*.array_record*`."""

    def __init__(self, pattern: str):
        self._records = open_files(_files(pattern))
        super().__init__(f"arrayrecord:{pattern}", len(self._records))

    def _read(self, index: int) -> bytes:
        return self._records[index]


class _Whole(NamedTuple):
    """All records of a file, in the library's words; with their number it need not open the file to count them."""

    filename: str
    skip: int
    take: int
    examples_in_shard: int


def open_files(files: Sequence[Path]) -> ArrayRecordDataSource:
    """Random access to the records of all files, one after another. Raises DataError naming a file it cannot read."""
    whole = []
    for file in files:
        reader = ArrayRecordReader(str(file))  # of a broken file it says no more than `ok`
        if not reader.ok():
            raise DataError(f"{file} is not a readable ArrayRecord file, or was cut off when it was written or copied")
        whole.append(_Whole(str(file), 0, reader.num_records(), reader.num_records()))
        reader.close()
    return ArrayRecordDataSource(whole)


def _files(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        if (path / "statistics.json").is_file():
            raise DataError(f"arrayrecord:{pattern} holds token rows, not conversations; name it as rows:{pattern}")
        files = sorted(path.glob("*.array_record*"))
    elif path.is_file():
        files = [path]
    else:
        files = sorted(Path(name) for name in glob.glob(str(path)))
    if not files:
        raise DataError(f"arrayrecord:{pattern} names no file (looked in {Path.cwd()})")
    return files
