"""Every verifying strategy, and the paper's block cache, without a cache: the whole text in every forward."""

import functools

import decoding_reference
import jax
import jax.numpy as jnp
import numpy as np
from decoding_reference import LENGTH, attend
from flax import nnx


class Model:
    """A decoder, the ids it may not emit, and what its masks are: a token, or vectors that a probe hands over."""

    def __init__(self, decoder, forbidden, mask=None):
        self.decoder, self.forbidden, self.mask = decoder, list(forbidden), mask
        self.table = np.asarray(decoder.embed_table.embedding[...])
        self._known = {}

    def logits(self, ids, vectors=None):
        """[len(ids) + len(vectors), V] float64."""
        if vectors is not None:
            rows = _with_vectors(self.decoder)(ids, np.asarray(vectors, np.float32))
        elif (key := tuple(ids)) in self._known:
            return self._known[key]
        else:
            rows = decoding_reference.logits_of(self.decoder, ids)
        rows = rows.astype(np.float64)
        rows[:, self.forbidden] = -np.inf
        if vectors is None:
            self._known[key] = rows
        return rows

    def asked(self, ids, k, vectors=None):
        """[k, V], what k masks behind a text say."""
        rows = self.logits([*ids, *[self.mask] * k]) if vectors is None else self.logits(ids, vectors)
        return rows[len(rows) - k :]

    def choice(self, ids):
        return int(self.logits(ids)[-1].argmax())


@functools.cache
def _with_vectors(decoder):
    graphdef, params = nnx.split(decoder)

    @jax.jit
    def run(params, tokens, vectors, is_vector):
        model = nnx.merge(graphdef, params)
        embeddings = jnp.where(is_vector[:, None], vectors, model.embed(tokens))[None]
        return model.unembed(model(embeddings=embeddings, positions=jnp.arange(LENGTH)[None], attend=attend)[0])[0]

    def padded(ids, vectors):
        total = len(ids) + len(vectors)
        tokens, rows = np.zeros(LENGTH, np.int32), np.zeros((LENGTH, vectors.shape[1]), np.float32)
        tokens[: len(ids)], rows[len(ids) : total] = ids, vectors
        place = np.arange(LENGTH)
        return np.asarray(run(params, tokens, rows, (place >= len(ids)) & (place < total)))[:total]

    return padded


def softmax(rows):
    p = np.exp(rows - rows.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def is_sure(row, token, tau, measure="probability"):
    """Whether τ accepts a token of a row of logits."""
    p = softmax(row)
    if measure == "entropy":
        return tau > 0 and -(p[p > 0] * np.log(p[p > 0])).sum() <= tau
    second, first = np.sort(p)[-2:]
    return tau < 1 and (p[token] if measure == "probability" else first - second) >= tau


# --- candidates → trees; a tree is a list of (index of the parent or -1, token, whether τ accepts it) ---


def _best(p, width, parent_token):
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    return [i for i in order if i != parent_token][:width]


def _passed_over(row, parent_token, measure):
    """Margin and entropy are of the likeliest token; they are no measure of what takes its place."""
    return measure != "probability" and int(row.argmax()) == parent_token


class Alone:
    """Rows of masks that do not know the token before the one they predict."""

    def __init__(self, rows):
        self.rows, self.k = rows, len(rows)

    def row(self, i, before):
        return self.rows[i]


def static_tree(asked, last, widths, tau=1.0, measure="probability"):
    tree, behind = [], -1
    for i, width in enumerate(widths):
        first, row = len(tree), asked.row(i, last)
        for rank, token in enumerate(_best(softmax(row), width, last)):
            sure = rank == 0 and not _passed_over(row, last, measure) and is_sure(row, token, tau, measure)
            tree.append((behind, token, sure))
        last, behind = tree[first][1], first
    return tree


def dynamic_tree(asked, last, nodes, tau=1.0, measure="probability", found=()):
    """The best `nodes` by the product of probabilities along the path, after what lookup found."""
    tree = [(i - 1, token, False) for i, token in enumerate(found)]
    pool, path, behind, same = [], 1.0, -1, True  # behind: a node of lookup, or a place in the pool
    for depth in range(asked.k):
        row = asked.row(depth, last)
        p, parent_token, first = softmax(row), last, len(pool)
        for rank, token in enumerate(_best(p, nodes - depth, parent_token)):
            sure = rank == 0 and not _passed_over(row, parent_token, measure) and is_sure(row, token, tau, measure)
            twice = same and depth < len(found) and token == found[depth]
            pool.append((path * p[token] if not twice else -1.0, behind, token, sure))
        last, path = pool[first][2], path * p[pool[first][2]]
        same = pool[first][0] < 0
        behind = ("found", depth) if same else ("pool", first)
    order = sorted(range(len(pool)), key=lambda i: -pool[i][0])[: nodes - len(found)]
    at = {("pool", i): len(found) + rank for rank, i in enumerate(order)}
    at |= {("found", i): i for i in range(len(found))} | {-1: -1}
    return tree + [(at[pool[i][1]], *pool[i][2:]) for i in order]


def a_chain(asked, last, tau=1.0, measure="probability"):
    tree = []
    for i in range(asked.k):
        row = asked.row(i, last)
        last = int(row.argmax())
        tree.append((i - 1, last, is_sure(row, last, tau, measure)))
    return tree


def looked_up(ids, k, longest=3):
    """What followed the latest earlier occurrence of the longest n-gram of the text's end that occurs earlier."""
    for n in range(longest, 0, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            if ids[end - n : end] == ids[len(ids) - n :]:
                return ids[end : end + k]
    return []


class Probe:
    """k mask vectors of one request."""

    def __init__(self, table, prompt, k, start, rate=0.1, memory=1.0):
        e = table[prompt].astype(np.float64)
        self.table, self.rate, self.memory = table, rate, memory
        if start == "mean":
            self.vectors = np.tile(e.mean(0), (k, 1))
        elif start == "last":
            self.vectors = np.stack([e[max(0, len(e) - k + i)] for i in range(k)])
        else:
            self.vectors = np.zeros((k, e.shape[1]))
        self.velocity, self.before = np.zeros(e.shape[1]), prompt[-1]

    def see(self, tokens):
        for token in tokens:
            e, before = (self.table[i].astype(np.float64) for i in (token, self.before))
            self.vectors = self.vectors + self.rate * (e - self.vectors)
            self.velocity = self.memory * self.velocity + (1 - self.memory) * (e - before)
            self.before = token

    @property
    def masks(self):
        return self.vectors + np.arange(1, len(self.vectors) + 1)[:, None] * self.velocity


# --- decoding --------------------------------------------------------------------------------------------------------


def _cut(emitted, room, end):
    emitted = emitted[:room]
    return emitted[: emitted.index(end) + 1] if end in emitted else emitted


def walk(model, known, tree):
    """(tokens accepted, the model's own token behind them): to its own choice, else to what τ accepts from the root."""
    path, at, sure = [], -1, {-1: True}
    for i, (parent, _, accepts) in enumerate(tree):
        sure[i] = sure[parent] and accepts
    while True:
        own = model.choice([*known, *path])
        children = [i for i, node in enumerate(tree) if node[0] == at]
        ways = [i for i in children if tree[i][1] == own] or [i for i in children if sure[i]]
        if not ways:
            return path, own
        at = ways[0]
        path.append(tree[at][1])


def decode(model, prompt, propose, *, limit, end, first=(), further=None):
    """(ids, accepted run lengths).

    Args:
      propose: (text before the step, its tree, accepted tokens, text after it) → the next step's tree.
      first: the tree of the first step. further: (text with the accepted drafts) → tokens behind the model's own one.
    """
    ids, runs, tree = [], [], list(first)
    while True:
        known = [*prompt, *ids]
        path, own = walk(model, known, tree)
        more = further([*known, *path]) if further is not None else []
        emitted = _cut([*path, own, *more], limit - len(ids), end)
        ids += emitted
        runs.append(len(emitted))
        if ids[-1] == end or len(ids) == limit:
            return ids, runs
        tree = propose(known, tree, path, [*prompt, *ids])


def decode_masks(model, prompt, *, k, form, limit, end, tau=1.0, measure="probability", probe=None, lookup=0):
    """Trees and rows of drafts out of the model's masks. form: "comb", "chain", ("static", widths), ("dynamic", N).

    A model may have `behind` (text, k), which gives what `Alone` is.
    """
    probe = Probe(model.table, prompt, k, **probe) if probe is not None else None

    def propose(known, tree, path, after):
        asked, text = None, [*known, *path]
        if form != "chain" or len(path) == len(tree):  # else no masks saw what was accepted
            # The masks were in the step's own forward: of the vectors from before it.
            behind = getattr(model, "behind", None)
            asked = behind(text, k) if behind else Alone(model.asked(text, k, probe and probe.masks))
        if probe is not None:
            probe.see(after[len(known) :])
        if asked is None:
            return []
        if form in ("comb", "chain"):
            return a_chain(asked, after[-1], tau, measure)
        kind, size = form
        if kind == "static":
            return static_tree(asked, after[-1], size, tau, measure)
        return dynamic_tree(asked, after[-1], size, tau, measure, looked_up(after, lookup) if lookup else ())

    return decode(model, prompt, propose, limit=limit, end=end)


def decode_lookup(model, prompt, *, k, limit, end):
    def propose(known, tree, path, after):
        return [(i - 1, token, False) for i, token in enumerate(looked_up(after, k))]

    return decode(model, prompt, propose, limit=limit, end=end, first=propose(None, None, None, prompt))


def decode_jacobi(model, prompt, *, k, limit, end):
    """The first iterate is the prompt's last token, k times over; the last choice fills up."""

    def propose(known, tree, path, after):
        guesses = [token for _, token, _ in tree]
        own = model.logits([*known, *guesses]).argmax(1)[len(known) - 1 :]
        return [(i - 1, int(own[min(len(path) + 1 + i, k)]), False) for i in range(k)]

    first = [(i - 1, prompt[-1], False) for i in range(k)]
    return decode(model, prompt, propose, limit=limit, end=end, first=first)


def decode_speculative(
    model, draft, prompt, *, k, limit, end, window=1, tau=1.0, draft_window=1, measure="probability"
):
    def propose(known, tree, path, after):
        said = []
        while len(said) < k:
            rows = draft.asked([*after, *said], draft_window - 1)  # the rows of the masks
            said += [draft.choice([*after, *said]), *(int(row.argmax()) for row in rows)]
        return [(i - 1, token, False) for i, token in enumerate(said[:k])]

    def further(text):
        more = []
        for row in model.asked(text, window - 1):
            token = int(row.argmax())
            if not is_sure(row, token, tau, measure):
                break
            more.append(token)
        return more

    first = propose(None, None, None, prompt)
    return decode(model, prompt, propose, limit=limit, end=end, first=first, further=further)


def decode_block(model, prompts, *, size, taus, limits, end):
    """([ids], [the forward of the row that gave each]) of a batch whose rows wait for each other."""
    ids, by = [[] for _ in prompts], [[] for _ in prompts]
    committed, forwards = [len(p) for p in prompts], 0

    def over(row):
        return len(ids[row]) == limits[row] or ids[row][-1:] == [end]

    while active := [row for row in range(len(prompts)) if not over(row)]:
        forwards += 1  # all rows began together
        filled = {row: len(prompts[row]) + len(ids[row]) - committed[row] for row in active}
        if all(filled[row] == size for row in active):
            for row in active:
                committed[row] += size
            continue
        for row in active:
            if (room := size - filled[row]) == 0:
                continue  # waits
            known = [*prompts[row], *ids[row]]
            rows = [model.logits(known)[-1], *model.asked(known, room - 1)]
            emitted = []
            for place, logits in enumerate(rows):
                token = int(logits.argmax())
                if place and not is_sure(logits, token, taus[row]):
                    break
                emitted.append(token)
            emitted = _cut(emitted, limits[row] - len(ids[row]), end)
            ids[row] += emitted
            by[row] += [forwards] * len(emitted)
    return ids, by
