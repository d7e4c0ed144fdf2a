"""`rows:DIRECTORY`: what `marsjax data build` wrote, as a row set; a row is read when it is asked for."""

from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from marsjax.data.arrayrecord import open_files
from marsjax.data.build import SIZES
from marsjax.data.identity import Identity
from marsjax.data.row_sets import Sizes
from marsjax.data.rows import Row, RowMaker
from marsjax.data.sources import DataError
from marsjax.data.statistics import read_statistics
from marsjax.data.token_records import decode_row


class BuiltRows:
    """Rows by index from the files of a built directory. Raises DataError naming every difference if they were made
    otherwise than `maker` makes them, and for files that are missing or cut off."""

    counted = True

    def __init__(self, directory: str | Path, maker: RowMaker):
        self.name = f"rows:{directory}"
        path = Path(directory).expanduser()
        if not path.is_dir():
            raise DataError(f"{self.name}: no such directory (looked in {Path.cwd()})")
        survey = read_statistics(path)
        if different := survey.identity.differences(Identity.of(maker)):
            raise DataError(
                f"{self.name} was built for another run: {'; '.join(different)}; build it again from {survey.source} "
                "with this run's model and length"
            )
        self.stats, self.fingerprint = survey.stats, survey.fingerprint
        self._records = open_files(sorted(path.glob("rows-train.array_record-*")))
        self._path = path
        if len(self._records) != self.stats.rows:
            raise DataError(f"{self.name} holds {len(self._records)} rows, not the {self.stats.rows} that were written")

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} of {self.name}")
        try:
            return decode_row(self._records[index])
        except (ValueError, RuntimeError) as error:  # RuntimeError: a damaged file
            raise DataError(f"{self.name}, row {index}: {error}") from None

    def sizes(self) -> Sizes:
        try:
            with np.load(self._path / SIZES) as file:
                sizes = Sizes(*(file[name] for name in Sizes._fields))
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise DataError(f"{self._path / SIZES} cannot be read: {error!r}; build again") from error
        if len(sizes.tokens) != len(self):
            raise DataError(f"{self._path / SIZES} is of {len(sizes.tokens)} rows, not {len(self)}; build again")
        return sizes
