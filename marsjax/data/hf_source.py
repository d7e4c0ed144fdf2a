"""`hf:REPO[:SPLIT]`: parquet files of a data set on the Hugging Face hub, or of a directory, read by index."""

import re
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from marsjax.data.conversations import COLUMNS, FORMS
from marsjax.data.sources import DataError, Records, missing_extra

_CONVERTED = "refs/convert/parquet"  # the branch in which the hub keeps a parquet copy of data sets in other formats
_GROUPS = 4  # row groups kept in memory; reading in order needs one


class ParquetRecords(Records):
    """Rows of the files of one split (train unless named), in the order of the files' names.

    REPO is OWNER/NAME, with /FOLDER behind it where the data set has several configurations; or a directory.
    """

    def __init__(self, rest: str):
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise missing_extra(f"hf:{rest}", "pyarrow") from error
        self.name = f"hf:{rest}"
        self._files: list[tuple[Any, list[str]]] = []
        ends: list[int] = []
        self._groups: list[tuple[int, int]] = []  # (file, row group in it)
        for file in _find(rest):
            try:
                opened = parquet.ParquetFile(file, memory_map=True)
            except (ValueError, OSError) as error:  # pyarrow's own are of these kinds
                raise DataError(f"{self.name}: {file} is not a readable parquet file: {error}") from error
            names = opened.schema_arrow.names
            columns = [name for name in names if name in COLUMNS]
            if not columns:
                raise DataError(f"{self.name}: {file} has the columns {', '.join(names)}; none of {FORMS}")
            for group in range(opened.num_row_groups):
                self._groups.append((len(self._files), group))
                ends.append((ends[-1] if ends else 0) + opened.metadata.row_group(group).num_rows)
            self._files.append((opened, columns))
        self._ends = np.array(ends, np.int64)
        self._tables: OrderedDict[int, Any] = OrderedDict()
        super().__init__(self.name, ends[-1] if ends else 0)

    def _read(self, index: int) -> dict[str, Any]:
        group = int(np.searchsorted(self._ends, index, side="right"))
        start = self._ends[group - 1] if group else 0
        row = self._table(group).slice(index - start, 1).to_pylist()[0]
        # A column that only some rows use is null in the others.
        return {name: value for name, value in row.items() if value is not None}

    def _table(self, group: int) -> Any:
        if group not in self._tables:
            file, inside = self._groups[group]
            opened, columns = self._files[file]
            self._tables[group] = opened.read_row_group(inside, columns=columns)
            if len(self._tables) > _GROUPS:
                self._tables.popitem(last=False)
        self._tables.move_to_end(group)
        return self._tables[group]


def _find(rest: str) -> list[Path]:
    repo, colon, split = rest.rpartition(":")
    if not colon or "/" in split:
        repo, split = rest, ""
    directory = Path(repo).expanduser()
    if directory.is_dir():
        files = {str(p.relative_to(directory).as_posix()): p for p in directory.rglob("*.parquet")}
        return [files[name] for name in _of_split(list(files), split, f"hf:{rest}")]
    if repo.startswith(("/", "~", ".")):
        raise DataError(f"hf:{rest}: no such directory: {directory} (looked in {Path.cwd()})")
    return _download(repo, split, f"hf:{rest}")


def _of_split(files: list[str], split: str, name: str) -> list[str]:
    """The files of a split: it begins their name (train-00000-of-00001.parquet) or is their folder's name."""
    if not files:
        raise DataError(f"{name}: no parquet files there")
    wanted = split or "train"
    word = re.compile(rf"{re.escape(wanted)}(?:[-.].*|_\d+)?\.parquet")  # train_sft is another split
    found = [f for f in files if word.fullmatch(PurePosixPath(f).name) or PurePosixPath(f).parent.name == wanted]
    if not found and not split and len({str(PurePosixPath(f).parent) for f in files}) == 1:
        found = files  # files without a split's name are one split
    shown = ", ".join(sorted(files)[:10]) + (" …" if len(files) > 10 else "")
    if not found:
        raise DataError(f"{name}: no parquet file of a split {wanted!r}; there are {shown}")
    parents = {PurePosixPath(f).parent for f in found}
    folders = {str(parent.parent if parent.name == wanted else parent) for parent in parents}
    if len(folders) > 1:
        choices = ", ".join(sorted(folders))
        raise DataError(f"{name} has several configurations ({choices}); name one behind the repository: REPO/FOLDER")
    return sorted(found)


def _download(repo: str, split: str, name: str) -> list[Path]:
    import huggingface_hub as hub

    owner, *rest = repo.split("/")
    repo_id, folder = "/".join([owner, *rest[:1]]), "/".join(rest[1:])
    try:
        for revision in (None, _CONVERTED):
            there = hub.list_repo_files(repo_id, repo_type="dataset", revision=revision)
            inside = f"{folder}/" if folder else ""
            files = [f for f in there if f.endswith(".parquet") and f.startswith(inside)]
            if files:
                break
        wanted = _of_split(files, split, name)
        return [Path(hub.hf_hub_download(repo_id, f, repo_type="dataset", revision=revision)) for f in wanted]
    except DataError:
        raise
    except Exception as error:  # the network's, the hub's, httpx's
        raise DataError(f"{name} cannot be read from the hub: {type(error).__name__}: {error}") from error
