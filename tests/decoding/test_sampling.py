import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from marsjax.decoding.sampling import choose, greedy, top

choose = jax.jit(choose)
DRAWS = 4000
LOGITS = np.asarray([1.5, 0.3, -0.5, 1.5, -np.inf, 0.9, -1.0, 0.0], np.float32)


def draw(logits=LOGITS, rows=DRAWS, *, temperature=1.0, top_k=0, top_p=1.0, position=7, seeds=None):
    """One token a row; rows differ by seed."""
    full = lambda value, dtype: np.full(rows, value, dtype)  # noqa: E731
    ids = choose(
        np.broadcast_to(np.asarray(logits, np.float32), (rows, 1, len(logits))),
        np.full((rows, 1), position, np.int32),
        temperature=full(temperature, np.float32),
        top_k=full(top_k, np.int32),
        top_p=full(top_p, np.float32),
        seed=np.arange(rows, dtype=np.uint32) if seeds is None else np.asarray(seeds, np.uint32),
    )
    return np.asarray(ids)[:, 0]


def distribution(temperature=1.0, top_k=0, top_p=1.0):
    """By hand: sort, cut, renormalise; ties by id."""
    p = np.exp(LOGITS.astype(np.float64) / temperature)
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    order = order[: top_k or len(p)]
    total = sum(p[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if kept and mass >= top_p:
            break
        kept.append(i)
        mass += p[i] / total
    return {i: p[i] / sum(p[j] for j in kept) for i in kept if p[i] > 0}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_k": 1},
        {"top_p": 0.7},
        {"top_p": 0.05},
        {"top_k": 4, "top_p": 0.8, "temperature": 1.3},
        {"top_k": 500},
    ],
    ids=str,
)
def test_distribution(options):
    expected = distribution(**options)
    counts = np.bincount(draw(**options), minlength=len(LOGITS))
    assert set(np.flatnonzero(counts)) == set(expected)
    if len(expected) > 1:
        wanted = np.asarray([expected[i] for i in sorted(expected)]) * DRAWS
        assert chisquare(counts[sorted(expected)], wanted).pvalue > 1e-3


def test_positions_draw_anew():
    same = (draw(position=7) == draw(position=8)).mean()
    assert abs(same - sum(p * p for p in distribution().values())) < 0.04


def test_a_draw_depends_on_seed_and_position_only():
    whole = draw(rows=64)
    assert [draw(rows=1, seeds=[seed])[0] for seed in range(8)] == whole[:8].tolist()
    assert draw(rows=64, seeds=np.arange(63, -1, -1)).tolist() == whole[::-1].tolist()


def test_greedy_ties_go_to_the_lowest_id():
    assert draw(rows=3, temperature=0.0).tolist() == [0, 0, 0]
    assert draw([-np.inf, 1, 2, 2, 2], rows=1, temperature=0.0).tolist() == [2]


@pytest.mark.parametrize("shape", [(1, 1, 66), (2, 4, 704), (1, 1, 49152), (3, 2, 151936)], ids=str)
@pytest.mark.parametrize("many", [False, True])
def test_nan_is_never_a_token(shape, many):
    """The compiler's maximum drops NaN in long rows."""
    logits = jnp.zeros(shape).at[..., 3].set(-jnp.inf)
    broken = jnp.full(shape, jnp.nan) if many else logits.at[..., shape[-1] // 2].set(jnp.nan)
    for chosen in (greedy, jax.jit(greedy)):
        assert (chosen(broken) == shape[-1]).all()
        assert (chosen(logits) == 0).all()


def test_extremes():
    assert set(draw(rows=200, temperature=1e-6, logits=[0, 1, 2, -1])) == {2}
    assert set(draw(rows=200, top_p=0.0)) == {0}
    assert set(draw(rows=200, top_p=0.5, logits=[0, 0, -np.inf])) == {0}  # one token reaches p exactly
    hot = draw(rows=2000, temperature=1e6)
    assert 4 not in hot
    assert set(hot) == set(range(8)) - {4}


def test_greedy_rows_beside_sampling_rows():
    ids = choose(
        np.broadcast_to(LOGITS, (2, 3, 8)),
        np.arange(6, dtype=np.int32).reshape(2, 3),
        temperature=np.asarray([0, 1], np.float32),
        top_k=np.asarray([0, 2], np.int32),
        top_p=np.ones(2, np.float32),
        seed=np.asarray([0, 0], np.uint32),
    )
    assert ids[0].tolist() == [0, 0, 0]
    assert set(np.asarray(ids[1]).tolist()) <= {0, 3}


def test_no_sorting_unless_a_row_filters():
    """The sort stands inside a conditional of the one program."""
    rows = 2
    arguments = {"temperature": jnp.zeros(rows), "top_k": jnp.zeros(rows, int), "top_p": jnp.ones(rows)}
    jaxpr = jax.make_jaxpr(lambda logits, at, seed: choose.__wrapped__(logits, at, seed=seed, **arguments))(
        jnp.zeros((rows, 1, 8)), jnp.zeros((rows, 1), int), jnp.zeros(rows, jnp.uint32)
    )
    assert "cond" in str(jaxpr)
    assert not [e for e in jaxpr.eqns if e.primitive.name in ("sort", "random_bits")]


@pytest.mark.parametrize("vocab", [72, 640, 641])
def test_the_largest_of_a_row_ties_to_the_lowest_id(vocab):
    """Few different values, so that ties are everywhere: inside blocks, between them and at the edge."""
    draw = np.random.default_rng(vocab)
    values = draw.integers(0, 40, (2, 30, vocab)).astype(np.float32)
    values[draw.random(values.shape) < 0.1] = -np.inf
    for count in (1, 3, 9, vocab, vocab + 5):
        found, ids = map(np.asarray, jax.jit(top, static_argnums=1)(values, count))
        expected = np.argsort(-values, axis=-1, kind="stable")[..., :count]
        assert np.array_equal(ids, expected), count
        assert np.array_equal(found, np.take_along_axis(values, expected, -1))
