"""Lookup, trees and probing masks by themselves, on random tables."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies_reference as reference
from strategies_helpers import base, pretrained

from marsjax.decoding import Generator
from marsjax.decoding.proposers import lookup, trees
from marsjax.decoding.proposers.probing import Probe, ProbeParams


def test_lookup_finds_what_followed_the_longest_latest_match():
    """Texts of three letters, so that matches of every length occur; what lies past a text is nobody's."""
    draw = np.random.default_rng(0)
    texts = draw.integers(0, 3, (300, 40)).astype(np.int32)
    lengths = draw.integers(1, 41, 300).astype(np.int32)
    tokens, count = map(np.asarray, lookup.find(jnp.asarray(texts), jnp.asarray(lengths), 4))
    matched = 0
    for text, length, found, n in zip(texts.tolist(), lengths, tokens.tolist(), count, strict=True):
        assert found[:n] == reference.looked_up(text[:length], 4)
        matched += n > 0
    assert 250 < matched < 300


def grown(tree, logits, texts, lengths, measure=0):
    """The drafts a tree makes of [N, k, V] logits behind texts [N, T] of `lengths` [N]."""
    rows = len(texts)
    # The last two tokens are what the step emitted.
    state = SimpleNamespace(tokens=jnp.asarray(np.where(np.arange(texts.shape[1]) < lengths[:, None] - 2, texts, 0)))
    state.length = jnp.asarray(lengths - 2)
    at = lengths[:, None] - 2 + np.arange(2)
    seen = SimpleNamespace(
        state=state, length=jnp.asarray(lengths), emitted=jnp.asarray(np.take_along_axis(texts, at, 1))
    )
    last = np.take_along_axis(texts, lengths[:, None] - 1, 1)[:, 0]
    controls = SimpleNamespace(measure=jnp.full(rows, measure))

    def grow(x):
        return tree.of(seen, controls, lambda i, _: (x[:, i], x[:, i]), jnp.asarray(last), None)

    return jax.jit(grow)(jnp.asarray(logits, jnp.float32))


@pytest.mark.parametrize(
    ("nodes", "depth", "found"), [(5, 2, 0), (5, 2, 3), (4, 4, 0), (4, 4, 4), (9, 3, 2), (1, 1, 1)]
)
def test_a_dynamic_tree_holds_the_best_paths(nodes, depth, found):
    draw = np.random.default_rng(nodes)
    rows, vocab = 200, 12
    logits = draw.normal(0, 2, (rows, depth, vocab))
    logits[:, :, 1] = -np.inf  # may not be emitted
    texts, lengths = draw.integers(2, 6, (rows, 24)).astype(np.int32), draw.integers(3, 25, rows).astype(np.int32)
    drafts = grown(trees.Dynamic(nodes, depth, found), logits, texts, lengths)
    tokens, parents = np.asarray(drafts.tokens), np.asarray(drafts.parents)
    merged = 0
    for row in range(rows):
        text = texts[row, : lengths[row]].tolist()
        hits = reference.looked_up(text, found) if found else []
        expected = reference.dynamic_tree(reference.Alone(logits[row]), text[-1], nodes, found=hits)
        assert list(zip(parents[row] - 1, tokens[row], strict=True)) == [(p, t) for p, t, _ in expected]
        assert len({(p, t) for p, t, _ in expected}) == nodes  # no draft stands twice behind the same one
        merged += any(p == i >= 0 for i in range(len(hits)) for p, _, _ in expected[len(hits) :])
    if 0 < found < nodes:
        assert merged > 5  # candidates behind what lookup found


def test_a_tree_passes_over_the_parent_and_its_confidence():
    """The mask says the last token again: the next best stands in, by its own probability and by no other measure."""
    logits = np.log(np.asarray([[[0.02, 0.9, 0.05, 0.03], [0.1, 0.2, 0.65, 0.05]]]))
    texts, lengths = np.asarray([[3, 3, 1]], np.int32), np.asarray([3], np.int32)
    for measure, expected in ((0, [0.05, 0.2]), (1, [np.nan, np.nan]), (2, [np.nan, np.nan])):
        for tree in (trees.Static((2, 1)), trees.Dynamic(4, 2)):
            drafts = grown(tree, logits, texts, lengths, measure)
            tokens, sure = (np.asarray(x)[0].tolist() for x in (drafts.tokens, drafts.confidence))
            best = [tokens.index(2), tokens.index(1)]
            assert np.allclose([sure[i] for i in best], expected, equal_nan=True)
            assert np.isnan([s for i, s in enumerate(sure) if i not in best]).all()


def started(begin, prompts, k=3):
    network, params = base("tiny_mars").runtime.network, base("tiny_mars").runtime.params.target
    table = reference.Model(pretrained("tiny_mars").model, ()).table
    probe = Probe(k, table.shape[1], begin)
    tokens = np.zeros((len(prompts), 16), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.asarray([len(p) for p in prompts])
    state = SimpleNamespace(
        tokens=jnp.asarray(tokens), prompt=lengths, forwards=jnp.asarray([0] * (len(prompts) - 1) + [4])
    )
    how = ProbeParams(0.1, 1.0, table.mean(0), table.std(0))
    return table, np.asarray(probe.prefill(network, params, how, state, probe.start(len(prompts))).vector)


@pytest.mark.parametrize("begin", ["mean", "last", "zero"])
def test_where_a_probe_begins(begin):
    prompts = [[5, 9, 4, 33, 7], [6], [8, 7], [1, 2, 3]]
    table, vectors = started(begin, prompts)
    for prompt, got in zip(prompts[:-1], vectors, strict=False):
        assert np.allclose(got, reference.Probe(table, prompt, 3, begin).masks, atol=1e-6)
    assert not vectors[-1].any()  # in the middle of its answer: left alone


def test_a_probe_that_begins_with_a_sample_of_the_table():
    """The same in any lane, another for each mask, spread as the table is."""
    table, vectors = started("sample", [[5, 9], [6], [8, 7], [3]], k=400)
    assert np.array_equal(vectors[0], vectors[2])
    assert not np.array_equal(vectors[0], vectors[1])
    assert np.allclose(vectors[0].mean(0), table.mean(0), atol=5 * table.std() / np.sqrt(400))
    assert np.allclose(vectors[0].std(0), table.std(0), rtol=0.25)


def test_a_model_without_a_mask_token_is_probed_with_the_paper_s_rate():
    plain = dataclasses.replace(pretrained("tiny_random"), mask_id=None)
    tree = Generator(plain, strategy="tree", probe="zero", lanes=8)
    assert tree.runtime.strategy.proposer.probe.begin == "zero"
    assert tree.runtime.params.proposer.probe.memory == 1
    assert float(tree.runtime.params.proposer.probe.rate) == np.float32(0.1)
