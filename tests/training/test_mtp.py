"""Multi-token prediction against separate forward passes, one an anchor, that know nothing of packed rows."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from marsjax.attention import dense
from marsjax.attention.masks import single_stream_rows
from marsjax.data.batch import BatchFormat, align
from marsjax.models.adapters import attach, join
from marsjax.models.config import AdapterConfig
from marsjax.models.layers import Gate
from marsjax.parallel.sharding import make_mesh
from marsjax.training import mtp
from marsjax.training.attend import causal_attend
from marsjax.training.config import OptimizerSection
from marsjax.training.mtp import MultiToken
from marsjax.training.objectives import Forward, mars
from marsjax.training.optimizer import make_optimizer, make_schedule
from marsjax.training.state import new_state, parted, rebuild
from marsjax.training.step import Objective, batch_sharding, make_train_step, place_batch

K, LENGTH = 3, 20
KEEP_ALL = Forward()
MESH = make_mesh(fsdp=1)
ADAPTER = AdapterConfig(rank=3, alpha=6.0, masks=K, sampler=True)


def adapted(tiny, adapter=ADAPTER, seed=0):
    """The tiny decoder with a random adapter: `config`, `params` (all, numpy)."""
    model = attach(tiny.build(jax.tree.map(jnp.array, tiny.params)), adapter)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    trained, frozen = parted(model.config, params)
    trained = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), trained)
    trained, frozen = (jax.tree.map(jnp.asarray, tree) for tree in (trained, frozen))
    return SimpleNamespace(config=model.config, trained=trained, frozen=frozen, params=join(frozen, trained))


@pytest.fixture(scope="module")
def model(tiny):
    return adapted(tiny)


def packed(rows, normalisation="token", length=LENGTH, mask_id=None):
    """A batch of rows of documents (number of tokens, supervised columns)."""
    rng = np.random.default_rng(len(rows))
    tokens, segments, positions = (np.zeros((len(rows), length), np.int32) for _ in range(3))
    supervised = np.zeros((len(rows), length), bool)
    for n, documents in enumerate(rows):
        start = 0
        for number, (size, spans) in enumerate(documents, start=1):
            part = slice(start, start + size)
            tokens[n, part], positions[n, part] = rng.integers(2, 60, size), np.arange(size)
            segments[n, part] = number
            supervised[n, [start + i for span in spans for i in span]] = True
            start += size
    form = BatchFormat(len(rows), length, 1, mask_id, end_id=1, normalisation=normalisation)
    return align(tokens, supervised, positions, segments, form)


ROWS = [
    [(9, [range(4, 9)]), (8, [range(1, 3), range(5, 8)]), (3, [])],  # two turns in the second document
    [(20, [range(2, 20)])],
    [(4, [range(3, 4)]), (11, [range(0, 11)])],
]


@partial(jax.jit, static_argnames=("config", "options", "target_rows", "forward"))
def run(config, params, drawn, options, target_rows=None, forward=KEEP_ALL):
    return mtp.multi_token(rebuild(config, params), drawn, target_rows, options, forward)


def reference(config, params, batch, anchors, options):
    """Terms by loops over documents and anchors (`anchors`: columns of each row), each in a forward pass of its own."""
    model, k = rebuild(config, params), options.masks
    documents = [
        (n, np.flatnonzero(batch.segments[n] == number))
        for n in range(len(batch.tokens))
        for number in range(1, batch.segments[n].max() + 1)
    ]
    passes = [(n, columns, None) for n, columns in documents]
    passes += [(n, columns, a) for n, columns in documents for a in anchors[n] if a in columns]
    size = LENGTH + k  # a document's beginning, what is seen by nobody, then the masks
    ids, positions = np.zeros((len(passes), LENGTH), int), np.tile(np.arange(size), (len(passes), 1))
    sees = np.zeros((len(passes), size, size), bool)
    for i, (n, columns, anchor) in enumerate(passes):
        length = len(columns) if anchor is None else anchor - columns[0] + 1
        ids[i, :length] = batch.tokens[n, columns[:length]]
        positions[i, LENGTH:] = length + np.arange(k)
        there = (np.arange(size) < length) | (np.arange(size) >= LENGTH)
        sees[i] = np.tri(size, dtype=bool) & there
    masks = jnp.broadcast_to(model.masks(jnp.arange(k), jnp.float32), (len(passes), k, config.hidden_size))
    hidden, _ = model(
        embeddings=jnp.concatenate([model.embed(jnp.asarray(ids)), masks], axis=1),
        positions=jnp.asarray(positions),
        attend=lambda q, k, v, state: (dense.attend(q, k, v, jnp.asarray(sees)), state),
        gate=Gate(size, k),
    )
    ordinary, asked = {}, {}
    for i, (n, columns, anchor) in enumerate(passes):
        if anchor is None:
            ordinary |= {(n, t): hidden[i, t - columns[0]] for t in columns if batch.weights[n, t]}
        else:
            for j in range(1, k + 1):
                t = anchor + j
                if t in columns and batch.weights[n, t]:
                    asked.setdefault((n, t), []).append((i, j))

    def sample(before, states):
        x = jnp.concatenate([model.embed(before), states], axis=-1)
        for linear, norm in ((model.sampler.first, model.sampler.first_norm),
                             (model.sampler.second, model.sampler.second_norm)):  # fmt: skip
            x = x @ linear.kernel[...] + linear.bias[...]
            x = x / (1 + jnp.exp(-x))
            x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
            x = x * norm.scale[...] + norm.bias[...]
        return x

    def before_of(i, j, n, t):
        """The token before that of mask j: the data's, or what the sampler chose at the mask before."""
        if j == 1 or not options.free_running:
            return jnp.asarray(batch.tokens[n, t])
        before = before_of(i, j - 1, n, t - 1)
        return model.unembed(sample(before, hidden[i, LENGTH + j - 2])).argmax()

    def losses(states, at):
        logp = jax.nn.log_softmax(model.unembed(states))
        p = jax.nn.softmax(model.unembed(jax.lax.stop_gradient(jnp.stack([ordinary[x] for x in at]))))
        hard = -logp[jnp.arange(len(at)), np.array([batch.targets[x] for x in at])]
        loss = -(p * logp).sum(-1) if options.soft_targets else hard
        loss += options.tv_weight * jnp.abs(p - jnp.exp(logp)).sum(-1) / 2
        return (np.array([batch.weights[x] for x in at]) * loss).sum()

    rows = [(at, i, j) for at, found in asked.items() for i, j in found]
    of_masks, of_ordinary = [at for at, _, _ in rows], list(ordinary)
    z, own = jnp.stack([hidden[i, LENGTH + j - 1] for _, i, j in rows]), jnp.stack(list(ordinary.values()))
    before = jnp.stack([before_of(i, j, *at) for at, i, j in rows])
    base = losses(z, of_masks) + (0 if config.adapter.gated else losses(own, of_ordinary))
    sampler = losses(sample(before, z), of_masks)
    sampler += losses(sample(jnp.array([batch.tokens[x] for x in of_ordinary]), own), of_ordinary)
    count = sum(batch.weights[x] for x in of_masks + of_ordinary)
    squares = {at: [] for at in asked}
    for (at, _, _), state in zip(rows, z, strict=True):
        squares[at].append(((jax.lax.stop_gradient(ordinary[at]) - state) ** 2).mean())
    distance = sum(batch.weights[at] * sum(found) / len(found) for at, found in squares.items())
    distance /= sum(batch.weights[at] for at in squares)
    return {"mask": base / count, "sampler": sampler / count, "consistency": options.consistency * distance}


def all_anchors(batch):
    """Rows whose next token is supervised; those without a labelled mask change nothing."""
    return [np.flatnonzero(w) for w in batch.weights]


VARIANTS = {
    "plain": {},
    "soft targets and total variation": {"soft_targets": True, "tv_weight": 2.0, "consistency": 0.5},
    "free running, total variation": {"free_running": True, "tv_weight": 0.7},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_pass_equals_separate_passes(model, variant):
    """Losses and gradients of the adapter, packed and over turns."""
    batch, options = packed(ROWS), MultiToken(K, **VARIANTS[variant])

    def wanted(trained):
        terms = reference(model.config, join(model.frozen, trained), batch, all_anchors(batch), options)
        return sum(terms.values()), terms

    def found(trained):
        drawn = mtp.draw(batch, jax.random.key(0), None, options)
        sums = run(model.config, join(model.frozen, trained), drawn, options, forward=Forward(chunk_bytes=4 * 72 * 20))
        return sums.numerator / sums.denominator, {name: x / sums.denominator for name, x in sums.terms.items()}

    (total, terms), gradients = jax.jit(jax.value_and_grad(wanted, has_aux=True))(model.trained)
    (own_total, own_terms), own_gradients = jax.jit(jax.value_and_grad(found, has_aux=True))(model.trained)
    np.testing.assert_allclose(own_total, total, rtol=1e-5)
    assert own_terms.keys() == terms.keys()
    for name, value in terms.items():
        np.testing.assert_allclose(own_terms[name], value, rtol=2e-5, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5), own_gradients, gradients)


def test_sequences_count_alike(model):
    batch, options = packed(ROWS, "sequence"), MultiToken(K)
    wanted = reference(model.config, model.params, batch, all_anchors(batch), options)
    sums = run(model.config, model.params, mtp.draw(batch, jax.random.key(0), None, options), options)
    for name, value in wanted.items():
        np.testing.assert_allclose(sums.terms[name] / sums.denominator, value, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("attention", ["dense", "splash"])
def test_attention_paths_agree(model, attention):
    batch, options = packed(ROWS), MultiToken(K)
    drawn = mtp.draw(batch, jax.random.key(0), None, options)

    def loss(trained, attention):
        sums = run(
            model.config,
            join(model.frozen, trained),
            drawn,
            options,
            forward=Forward(attention=attention, interpret=True),
        )
        return sums.numerator

    (a, of_a), (b, of_b) = (jax.value_and_grad(loss)(model.trained, name) for name in ("blocks", attention))
    np.testing.assert_allclose(b, a, rtol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x, rtol=1e-3, atol=1e-4), of_a, of_b)


@pytest.mark.parametrize("how", [{"remat": "nothing_saveable"}, {"unroll": True}], ids=["remat", "unrolled"])
def test_other_programs_compute_the_same(model, how):
    drawn = mtp.draw(packed(ROWS[:2]), jax.random.key(0), None, MultiToken(K, anchors=4))
    how, unroll = {**how}, how.get("unroll", False)
    how.pop("unroll", None)

    def loss(trained, unroll, forward):
        decoder = rebuild(model.config, join(model.frozen, trained), unroll=unroll)
        return mtp.multi_token(decoder, drawn, None, MultiToken(K, anchors=4), forward).numerator

    (a, of_a), (b, of_b) = (
        jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))(model.trained, *options)
        for options in ((False, KEEP_ALL), (unroll, Forward(**how)))
    )
    np.testing.assert_allclose(b, a, rtol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-5), of_a, of_b)


def test_plain_adapter_trains_ordinary_rows(tiny):
    plain = adapted(tiny, dataclasses.replace(ADAPTER, gated=False))
    batch, options = packed(ROWS[:1]), MultiToken(K)
    drawn = mtp.draw(batch, jax.random.key(0), None, options)
    sums = run(plain.config, plain.params, drawn, options)
    # The reference applies a plain adapter everywhere too, since the gate is the decoder's.
    for name, value in reference(plain.config, plain.params, batch, all_anchors(batch), options).items():
        np.testing.assert_allclose(sums.terms[name] / sums.denominator, value, rtol=2e-5, err_msg=name)


def test_drawn_anchors(model):
    batch, options = packed(ROWS), MultiToken(K, anchors=4)
    drawn = mtp.draw(batch, jax.random.key(1), None, options)
    assert drawn.anchors.shape == drawn.used.shape == (3, 4)
    chosen = [np.asarray(a)[np.asarray(u)] for a, u in zip(drawn.anchors, drawn.used, strict=True)]
    for columns, weights in zip(chosen, batch.weights, strict=True):
        assert (np.diff(columns) > 0).all()
        assert weights[columns].all()
        assert len(columns) == 4
    wanted = reference(model.config, model.params, batch, chosen, options)
    sums = run(model.config, model.params, drawn, options)
    for name, value in wanted.items():
        np.testing.assert_allclose(sums.terms[name] / sums.denominator, value, rtol=2e-5, err_msg=name)
    spread = np.asarray(mtp.draw(batch, None, None, options).anchors[1])  # of 18 rows
    assert np.diff(spread).max() <= 8
    others = [np.asarray(mtp.draw(batch, jax.random.key(key), None, options).anchors) for key in range(40)]
    assert any((x != np.asarray(drawn.anchors)).any() for x in others)
    # Every anchor that has a label is drawn at some time, and no other.
    whole = mtp.draw(batch, jax.random.key(0), None, MultiToken(K))
    may = [set(np.asarray(a)[np.asarray(u)]) for a, u in zip(whole.anchors, whole.used, strict=True)]
    assert [set(np.concatenate([x[n] for x in others])) for n in range(3)] == may


def test_fewer_target_rows_are_enough(model):
    batch, options = packed(ROWS), MultiToken(K)
    losses = []
    for rows in (None, 18):
        drawn = mtp.draw(batch, jax.random.key(0), rows, options)
        losses.append(run(model.config, model.params, drawn, options, target_rows=rows))
    assert drawn.anchors.shape[-1] == 18
    np.testing.assert_allclose(losses[0].numerator, losses[1].numerator, rtol=1e-6)
    assert losses[0].denominator == losses[1].denominator


def test_nothing_supervised_is_nothing(model):
    batch = packed([[(5, [])]])
    drawn = mtp.draw(batch, jax.random.key(0), None, MultiToken(K))
    sums = run(model.config, model.params, drawn, MultiToken(K))
    assert sums.numerator == 0
    assert sums.denominator == 0


def objective(options):
    return Objective(
        lambda model, drawn, rows: mtp.multi_token(model, drawn, rows, options, Forward()),
        lambda batch, key, rows: mtp.draw(batch, key, rows, options),
    )


def steps(model, loss, accumulation, batch, count=3):
    schedule = make_schedule(OptimizerSection(learning_rate=1e-2, warmup=0), count)
    optimizer = make_optimizer(OptimizerSection(clip_norm=None), schedule)
    step = make_train_step(model.config, loss, optimizer, schedule, mesh=MESH)
    trained = jax.tree.map(jnp.array, model.trained)
    state = new_state(rebuild(model.config, join(model.frozen, trained)), optimizer, 0, MESH)
    rows, metrics = len(batch.tokens) // accumulation, []
    with jax.set_mesh(MESH):
        for _ in range(count):
            placed = place_batch(batch, accumulation, rows, batch_sharding(MESH, rows))
            state, values = step(state, placed, None, model.frozen)
            metrics.append({name: float(value) for name, value in values.items()})
    return state, metrics


def test_only_the_adapter_has_moments_and_accumulation_changes_nothing(model):
    batch = packed([*ROWS, [(6, [range(2, 6)])]])
    options = MultiToken(K, anchors=3)
    (one, losses), (two, again) = (steps(model, objective(options), a, batch) for a in (1, 2))
    count = sum(x.size for x in jax.tree.leaves(model.trained))
    moments = sum(x.size for x in jax.tree.leaves(one.opt_state))
    assert 2 * count <= moments <= 2 * count + 4  # and counters
    for a, b in zip(losses, again, strict=True):
        np.testing.assert_allclose([*a.values()], [*b.values()], rtol=1e-5)
    assert losses[0]["loss"] > losses[-1]["loss"]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), one.params, two.params)


def test_gated_mars_trains_the_adapter_alone(tiny):
    """Its clean rows are the frozen model's, so L_AR is left out; real tokens in a noisy block get no adapter."""
    gated = adapted(tiny, AdapterConfig(rank=3, alpha=6.0, masks=1))
    batch = packed([[(16, [range(3, 16)])]], mask_id=64)

    def loss(model, batch, rows):
        return mars(model, batch, block_size=4, noisy_length=rows)

    sums = loss(rebuild(gated.config, gated.params), batch, None)
    assert set(sums.terms) == {"mask"}
    model, of_blocks = rebuild(gated.config, gated.params), 0.0
    for ids, masks, first in ((batch.tokens[0, :8], 4, 8), (batch.tokens[0, :3], 1, 2)):  # block 2, block 0
        size = len(ids) + masks
        positions = jnp.arange(size)[None]
        attend = causal_attend(single_stream_rows(positions, jnp.ones_like(positions)), "dense")
        of_masks = model.masks(np.zeros(masks, int), jnp.float32)
        embedded = jnp.concatenate([model.embed(jnp.asarray(ids)), of_masks])[None]
        hidden, _ = model(embeddings=embedded, positions=positions, attend=attend, gate=Gate(size, masks))
        logp = jax.nn.log_softmax(model.unembed(hidden[0, first:]))
        of_blocks -= logp[jnp.arange(size - first), batch.targets[0, first:size]].sum()
    weights = batch.weights * ((np.arange(LENGTH) // 4 == 2) | (np.arange(LENGTH) // 4 == 0))
    only = loss(model, batch._replace(weights=weights), None)
    np.testing.assert_allclose(only.numerator, of_blocks, rtol=1e-5)

    state, losses = steps(gated, Objective(loss), 1, batch)
    assert losses[0]["loss"] > losses[-1]["loss"]
    assert jax.tree.structure(state.params) == jax.tree.structure(gated.trained)
