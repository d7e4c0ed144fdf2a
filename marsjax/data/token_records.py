"""Token rows as `tf.train.Example` bytes, which tensorflow-datasets reads too; written and read without either library.

Features, all lists of int64: `ids`, `span_starts` and `span_ends` (supervised spans, ends exclusive), `complete`.
"""

from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from marsjax.data.row_sets import supervised_runs
from marsjax.data.rows import Row

FEATURES = ("ids", "span_starts", "span_ends", "complete")


def _example_class() -> Any:
    """The message class of tf.train.Example (tensorflow/core/example/example.proto), of integer features only.

    Under a package name of its own: TensorFlow's own description may be in the same process.
    """
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="marsjax/example.proto", package="marsjax", syntax="proto3")

    def field(message: Any, name: str, number: int, kind: int, label: int, type_name: str | None = None) -> Any:
        return message.field.add(name=name, number=number, type=kind, label=label, type_name=type_name)

    one, many = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED
    integers = file.message_type.add(name="Int64List")
    field(integers, "value", 1, kinds.TYPE_INT64, many)
    feature = file.message_type.add(name="Feature")
    field(feature, "int64_list", 3, kinds.TYPE_MESSAGE, one, ".marsjax.Int64List")
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    field(entry, "key", 1, kinds.TYPE_STRING, one)
    field(entry, "value", 2, kinds.TYPE_MESSAGE, one, ".marsjax.Feature")
    field(features, "feature", 1, kinds.TYPE_MESSAGE, many, ".marsjax.Features.FeatureEntry")
    example = file.message_type.add(name="Example")
    field(example, "features", 1, kinds.TYPE_MESSAGE, one, ".marsjax.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("marsjax.Example"))


_Example = _example_class()


def encode_row(row: Row) -> bytes:
    """A row's record; the same bytes for the same row."""
    starts, ends = supervised_runs(row.supervised)
    example = _Example()
    for name, values in zip(FEATURES, (row.ids, starts, ends, np.array([row.complete])), strict=True):
        example.features.feature[name].int64_list.value.extend(values.astype(np.int64).tolist())
    return example.SerializeToString(deterministic=True)


def decode_row(record: bytes) -> Row:
    """The row of a record. Raises ValueError if it is none."""
    try:
        feature = _Example.FromString(record).features.feature
        ids, starts, ends, complete = (feature[name].int64_list.value for name in FEATURES)
    except Exception as error:  # protobuf's
        raise ValueError(f"not a token row: {error}") from None
    if not ids or len(starts) != len(ends) or len(complete) != 1:
        raise ValueError(f"not a token row: {len(ids)} ids, {len(starts)} starts and {len(ends)} ends of spans")
    supervised = np.zeros(len(ids), bool)
    for start, end in zip(starts, ends, strict=True):
        supervised[start:end] = True
    return Row(np.array(ids, np.int32), supervised, bool(complete[0]))
