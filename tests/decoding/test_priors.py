"""What is known of a token by the one before it: counts of this text, and the model's own bigrams."""

import itertools
from types import SimpleNamespace

import decoding_reference as reference
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_helpers import MASK, PAD, generator, pretrained

from marsjax.decoding.proposers import priors, trees
from marsjax.decoding.proposers.priors import EXPONENT, FLOOR, KEPT, Prior, bigrams

VOCAB = 12


def by_hand(p, before, text, followers, expected=None):
    """Probabilities of a mask, mixed in plain Python."""
    if expected is not None:
        weighed = [x * np.exp(EXPONENT * expected.get(i, FLOOR)) for i, x in enumerate(p)]
        p = [x / sum(weighed) for x in weighed]
    after = [b for a, b in itertools.pairwise(text) if a == before]
    if followers is None or not after:
        return p
    return [(1 - followers) * x + followers * after.count(i) / len(after) for i, x in enumerate(p)]


@pytest.mark.parametrize("followers", [None, 0.0, 0.4, 1.0])
@pytest.mark.parametrize("with_bigrams", [False, True])
def test_mixed(followers, with_bigrams):
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, 4, n).tolist() for n in (1, 2, 9, 15)]
    p = draw.dirichlet(np.ones(VOCAB), len(texts))
    before = np.array([0, texts[1][0], 2, 9])
    table = {i: {int(t): float(-draw.exponential()) for t in draw.permutation(VOCAB)[:3]} for i in range(VOCAB)}
    ids, logp = (np.array([list(f(table[i])) for i in range(VOCAB)]) for f in (dict.keys, dict.values))
    prior = Prior(
        None if followers is None else jnp.float32(followers), *((ids, jnp.float32(logp)) if with_bigrams else ())
    )
    tokens = np.array([text + [9] * (16 - len(text)) for text in texts])  # what lies behind a text is not of it
    got = prior.mixed(jnp.log(jnp.float32(p)), before, tokens, np.array([len(t) for t in texts]))
    for row, text in enumerate(texts):
        expected = table[before[row]] if with_bigrams else None
        wanted = by_hand(p[row].tolist(), before[row], text, followers, expected)
        np.testing.assert_allclose(np.exp(got[row]), wanted, atol=1e-6)


def test_bigrams_are_the_model_s_own_and_kept_in_a_file(tmp_path):
    runtime, prefix = generator("tiny_mars", "ar").runtime, [50, 9, 4]
    vocab = runtime.vocab_size
    file = tmp_path / "new" / "table.npz"
    ids, logp = bigrams(file, runtime.network, runtime.params.target, prefix, vocab)
    for token in (0, 7, vocab - 1):
        logits = reference.logits_of(pretrained("tiny_mars").model, [*prefix, token])[-1]
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        np.testing.assert_allclose(logp[token], np.sort(expected)[::-1][:KEPT], atol=1e-5)
        np.testing.assert_allclose(expected[np.asarray(ids[token])], logp[token], atol=1e-5)
    again = bigrams(file, runtime.network, runtime.params.target, prefix, vocab)
    assert np.array_equal(again[0], ids)
    other = generator("tiny_random", "ar").runtime
    with pytest.raises(ValueError, match="table of another model"):
        bigrams(file, other.network, other.params.target, prefix, vocab)
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ValueError, match="is no table of bigrams"):
        bigrams(file, runtime.network, runtime.params.target, prefix, vocab)


def test_bigrams_that_cannot_be_written_or_read_cost_no_work(tmp_path, monkeypatch):
    monkeypatch.setattr(priors, "_made", None)
    runtime = generator("tiny_mars", "ar").runtime
    (tmp_path / "file").write_bytes(b"")
    broken = tmp_path / "broken.npz"
    ids, logp = np.zeros((72, KEPT), np.int32), np.zeros((72, KEPT), np.float32)
    for file, fields, message in (
        (tmp_path, None, "is a directory"),
        (tmp_path / "file" / "x", None, "cannot write"),
        (tmp_path / "file", None, "no table of bigrams"),
        (broken, {"ids": ids + 9999, "logp": logp, "model": logp}, "damaged"),
        (broken, {"ids": ids, "logp": logp * np.nan, "model": logp}, "damaged"),
        (broken, {"ids": ids[0], "logp": logp, "model": logp}, "damaged"),
        (broken, {"ids": ids, "logp": logp, "model": logp}, "another model"),
    ):
        if fields is not None:
            np.savez(file, **fields)
        with pytest.raises(ValueError, match=message):
            bigrams(file, runtime.network, runtime.params.target, [], runtime.vocab_size)


def test_bigrams_without_a_prefix(tmp_path):
    runtime = generator("tiny_mars", "ar").runtime
    _, logp = bigrams(tmp_path / "t.npz", runtime.network, runtime.params.target, [], runtime.vocab_size)
    logits = reference.logits_of(pretrained("tiny_mars").model, [7])[-1]
    best = logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert float(logp[7, 0]) == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_with_priors_stay_exact(tmp_path, temperature):
    """Ids that may not be emitted have no probability to mix with."""
    prompts = [[50, 3, 9, 21, 51, 30, 31, 32, 33], [4, 5, 6, 4, 5, 6], [50, 4, 4, 20, 51], [7]]
    options = {"max_new_tokens": 40, "temperature": temperature, "seed": range(4), "ignore_eos": True}
    base = generator("tiny_mars", "ar", lanes=4)
    expected = [r.ids for r in base.generate(prompts, **options)]
    assert not {MASK, PAD} & {i for ids in expected for i in ids}
    prior = {"followers": 0.5, "bigrams": tmp_path / "b.npz"}
    tree = base.with_strategy(strategy="tree", probe="zero", k=2, block_complexity=15, **prior)
    results = tree.generate(prompts, **options)
    assert [r.ids for r in results] == expected
    assert sum(r.forwards for r in results) < 150  # of 160


def test_candidates_are_those_the_prior_raises_and_none_that_are_forbidden():
    logits = jnp.log(jnp.array([[[0.4, 0.3, 0.2, 0.1, 0.0]] * 2]))  # one row, two masks; id 4 may not be emitted
    seen = SimpleNamespace(
        state=SimpleNamespace(tokens=jnp.array([[0, 3, 0, 4, 1, 2, 1, 0]]), length=jnp.array([7])),
        emitted=jnp.array([[0]]), length=jnp.array([8]),
    )  # fmt: skip
    gain = trees._given(Prior(jnp.float32(0.9)), seen)
    tokens, _, _ = trees._candidates(lambda i, _: (logits[:, i],) * 2, jnp.array([0]), (2, 2), gain)
    assert tokens[0].tolist() == [[3, 1]]  # 0 was followed by 3 and by 4
    assert tokens[1].tolist() == [[0, 1]]  # and 3 by 0
