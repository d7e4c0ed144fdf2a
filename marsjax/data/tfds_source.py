"""`tfds:NAME[:SPLIT]`: data sets of tensorflow-datasets, read by index (`tfds.data_source`), without TensorFlow."""

import os
import re
from typing import Any

from marsjax.data.sources import DataError, Records, missing_extra

_PART = r"[A-Za-z_]\w*(?:\[[^\]]*\])?"  # train, or a part of it such as train[:80%]
_SPLIT = re.compile(rf"(.+):({_PART}(?:\+{_PART})*)")


class TfdsRecords(Records):
    """Records of one split (train unless named). NAME is what `tfds.builder` takes: with config, version, namespace.

    Data sets lie in TFDS_DATA_DIR, or where tensorflow-datasets has them by default; one that is not there yet is
    downloaded and prepared first.
    """

    def __init__(self, rest: str):
        try:
            import tensorflow_datasets as tfds
        except ImportError as error:
            raise missing_extra(f"tfds:{rest}", "tensorflow-datasets") from error
        name, split = split_name(rest)
        try:
            # Asked here: the library itself looks at the variable only when it is imported.
            self._records = tfds.data_source(name, split=split, data_dir=os.environ.get("TFDS_DATA_DIR"))
        except ImportError as error:  # huggingface:… wants `datasets`, some data sets want more
            raise ImportError(f"tfds:{rest}: {error}") from error
        except Exception as error:  # of many kinds, tensorflow-datasets' own among them
            said = str(error).strip().partition("\n")[0]  # further lines list every data set there is
            raise DataError(f"tfds:{rest} cannot be read: {type(error).__name__}: {said}") from error
        super().__init__(f"tfds:{rest}", len(self._records))

    def _read(self, index: int) -> Any:
        return self._records[index]


def split_name(rest: str) -> tuple[str, str]:
    """(name, split) of NAME[:SPLIT]; a name may hold colons itself: `huggingface:gsm8k`, `gsm8k:1.0.0`."""
    found = _SPLIT.fullmatch(rest)
    if found is None or _is_namespace(found[1]):
        return rest, "train"
    return found[1], found[2]


def _is_namespace(text: str) -> bool:
    from tensorflow_datasets.core.community import registry

    return text == "huggingface" or registry.community_register().has_namespace(text)
