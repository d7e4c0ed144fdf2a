"""A document's loss is the same in a row of its own and packed with others."""

from functools import partial

import jax
import numpy as np
import pytest

from marsjax.data.packing import pack
from marsjax.data.row_sets import Sizes
from marsjax.training.objectives import Forward, mars, sft

BLOCK, LENGTH = 4, 32


@pytest.fixture(scope="module")
def documents(make):
    return [d for seed in range(3) for d in make.documents(seed, (5, 9, 12, 17, 6, 3))]


@pytest.fixture(scope="module")
def packing(documents):
    lengths = np.array([len(ids) for ids, _ in documents], np.int32)
    first = np.array([first for _, first in documents], np.int32)
    sizes = Sizes(lengths, first, lengths, np.arange(len(documents) + 1))
    found = pack(sizes, length=LENGTH, block_size=BLOCK, order=np.arange(len(documents)))
    assert len(found) < len(documents) / 2
    assert found.noisy_length < LENGTH
    return found


def document_losses(tiny, loss, batch, count):
    """{(row, document in it): loss}: the objective with the weights of that document alone."""
    step = jax.jit(lambda weights: loss(tiny.build(tiny.params), batch._replace(weights=weights)).numerator)
    segments = np.asarray(batch.segments)
    at = [(row, n) for row in range(len(segments)) for n in range(1, segments[row].max() + 1)]
    assert len(at) == count
    alone = [np.where((np.arange(len(segments))[:, None] == row) & (segments == n), batch.weights, 0) for row, n in at]
    return {place: float(step(weights.astype(np.float32))) for place, weights in zip(at, alone, strict=True)}


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
@pytest.mark.parametrize(("objective", "attention"), [("mars", "blocks"), ("mars", "dense"), ("sft", "blocks")])
def test_per_document_losses(tiny, make, documents, packing, objective, attention, normalisation):
    forward, count = Forward(attention=attention), len(documents)

    def loss(rows):
        if objective == "sft":
            return partial(sft, target_rows=rows, forward=forward)
        return partial(mars, block_size=BLOCK, noisy_length=rows, forward=forward)

    options = {"length": LENGTH, "block_size": BLOCK, "normalisation": normalisation}
    packed = make.batch([[documents[d] for d in packing[row]] for row in range(len(packing))], **options)
    single = make.batch([[document] for document in documents], **options)
    together = document_losses(tiny, loss(packing.noisy_length), packed, count)
    apart = document_losses(tiny, loss(None), single, count)
    for row in range(len(packing)):
        for n, document in enumerate(packing[row], start=1):
            np.testing.assert_allclose(together[row, n], apart[int(document), 1], rtol=1e-5, err_msg=str(document))
    whole = [jax.jit(lambda b, r=rows: loss(r)(tiny.build(tiny.params), b))(batch) for rows, batch in
             ((packing.noisy_length, packed), (None, single))]  # fmt: skip
    np.testing.assert_allclose(whole[0].numerator, sum(apart.values()), rtol=1e-5)
    for a, b in zip(jax.tree.leaves(whole[0]), jax.tree.leaves(whole[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
