"""`load_rows`: from what `data.train` says to a row set."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from marsjax.data.mixture import MixedRows, check_weights
from marsjax.data.row_sets import RowSet, TokenisedRows
from marsjax.data.rows import RowMaker
from marsjax.text.chat import Message, same_day, turn_end_id

BUILT = "rows:"  # before a directory that marsjax data build wrote


def load_rows(
    source: str | Mapping[str, float] | Sequence[list[Message]],
    tokenizer: PreTrainedTokenizerFast,
    *,
    length: int,
    mask_id: int | None = None,
    end_id: int | None = None,
    **template_kwargs: Any,
) -> RowSet:
    """Rows of a source (see marsjax.data.sources), of a mixture {source: weight}, or of what `marsjax data build` wrote
    (rows:DIRECTORY), at most `length` tokens each.

    `end_id` closes answers; by default it is the token with which the chat template closes a turn. A template that
    writes the date writes the same one on every day (`same_day`), so that a run goes on with the rows it began with.
    """
    if isinstance(source, Mapping):
        options = {"length": length, "mask_id": mask_id, "end_id": end_id, **template_kwargs}
        weights = check_weights(source)
        return MixedRows({name: load_rows(name, tokenizer, **options) for name in weights}, weights)
    maker = row_maker(tokenizer, length, mask_id, end_id, template_kwargs)
    if isinstance(source, str) and source.startswith(BUILT):
        from marsjax.data.built import BuiltRows

        return BuiltRows(source.removeprefix(BUILT), maker)
    return TokenisedRows(source, maker)


def row_maker(
    tokenizer: PreTrainedTokenizerFast,
    length: int,
    mask_id: int | None,
    end_id: int | None,
    template_kwargs: Mapping[str, Any],
) -> RowMaker:
    """The one way from conversations to rows: training's, evaluation's and `marsjax data build`'s."""
    end_id = turn_end_id(tokenizer) if end_id is None else end_id
    return RowMaker(tokenizer, length, end_id, mask_id, {**same_day(tokenizer), **template_kwargs})
