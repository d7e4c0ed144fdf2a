"""The one network of the package: a pre-norm decoder of the Qwen2, Qwen3 and Llama 3 families.

It knows neither attention masks nor caches. Whoever calls it passes `attend`, which decides who sees whom and keeps
whatever it wants per layer in `layer_states`; see `marsjax.training.attend` and `marsjax.decoding.cache`.

Letters in shapes: N rows, S positions, D hidden, H query heads, K key/value heads, h head_dim, F intermediate,
V vocabulary rows, L layers.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from marsjax.models.config import Llama3Scaling, ModelConfig
from marsjax.models.layers import Gate, LayerNorm, Linear, RMSNorm, normal
from marsjax.parallel.sharding import Heads, constrain

Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
Layout = Literal["stacked", "list"]


def rope_frequencies(head_dim: int, theta: float, scaling: Llama3Scaling | None) -> jax.Array:
    """Angular frequency of each rotated pair, [h/2] float32, in radians a position."""
    freq = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return freq
    # Fraction of the way from "turns too slowly within the original context: stretch" to "turns fast: keep".
    turns = scaling.original_max_positions * freq / (2 * jnp.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = jnp.clip(keep, 0.0, 1.0)
    return freq * (keep + (1 - keep) / scaling.factor)


def rope_angles(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) of positions [N, S], each [N, S, 1, h/2] float32."""
    freq = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    angle = positions[..., None, None].astype(jnp.float32) * freq
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding in the half-split convention (pairs are i and i + h/2). x [N, S, heads, h]."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, c: ModelConfig, *, lead, rngs, dtype):
        linear = _options(c, lead, rngs, dtype)
        heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        q_axis, kv_axis = Heads("heads", c.head_dim), Heads("kv_heads", c.head_dim)
        self.q = Linear(c.hidden_size, heads, ("embed", q_axis), bias=c.qkv_bias, **linear("q"))
        self.k = Linear(c.hidden_size, kv_heads, ("embed", kv_axis), bias=c.qkv_bias, **linear("k"))
        self.v = Linear(c.hidden_size, kv_heads, ("embed", kv_axis), bias=c.qkv_bias, **linear("v"))
        self.o = Linear(heads, c.hidden_size, (q_axis, "embed"), **linear("o"))
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps, lead=lead, dtype=dtype) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps, lead=lead, dtype=dtype) if c.qk_norm else None
        self.head_dim = c.head_dim

    def __call__(self, x, cos, sin, attend: Attend, layer_state, gate=None):
        """x [N, S, D], or with its rows flattened [N*S, D]; cos, sin [N, S, 1, h/2]; gate: see `Decoder`."""
        q, k, v = (y.reshape(*cos.shape[:-2], -1, self.head_dim) for y in self.project(x, gate))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed, layer_state = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, layer_state)
        return self.o(mixed.reshape(*x.shape[:-1], -1), gate), layer_state

    def project(self, x, gate):
        return self.q(x, gate), self.k(x, gate), self.v(x, gate)


class MLP(nnx.Module):
    def __init__(self, c: ModelConfig, *, lead, rngs, dtype):
        linear = _options(c, lead, rngs, dtype)
        self.gate = Linear(c.hidden_size, c.intermediate_size, ("embed", "mlp"), **linear("gate"))
        self.up = Linear(c.hidden_size, c.intermediate_size, ("embed", "mlp"), **linear("up"))
        self.down = Linear(c.intermediate_size, c.hidden_size, ("mlp", "embed"), **linear("down"))

    def __call__(self, x, adapt=None):
        gate, up = self.project(x, adapt)
        return self.down(jax.nn.silu(gate) * up, adapt)

    def project(self, x, adapt):
        return self.gate(x, adapt), self.up(x, adapt)


def _options(c: ModelConfig, lead, rngs, dtype) -> Callable[[str], dict[str, Any]]:
    """Of the linears of a layer, by name."""

    def of(name: str) -> dict[str, Any]:
        adapter = c.adapter if c.adapter is not None and name in c.adapter.targets else None
        return {"lead": lead, "rngs": rngs, "scale": c.initializer_range, "dtype": dtype, "adapter": adapter}

    return of


class Layer(nnx.Module):
    """One decoder layer; with `lead=(L,)` the weights of L layers in one, to be sliced by a scan."""

    def __init__(self, c: ModelConfig, *, lead=(), rngs, dtype):
        self.attn_norm = RMSNorm(c.hidden_size, c.norm_eps, lead=lead, dtype=dtype)
        self.attn = Attention(c, lead=lead, rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(c.hidden_size, c.norm_eps, lead=lead, dtype=dtype)
        self.mlp = MLP(c, lead=lead, rngs=rngs, dtype=dtype)

    def __call__(self, x, cos, sin, attend: Attend, layer_state, gate=None):
        mixed, layer_state = self.attn(self.attn_norm(x), cos, sin, attend, layer_state, gate)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x), gate), layer_state


class Embed(nnx.Module):
    def __init__(self, c: ModelConfig, *, rngs, dtype):
        shape = (c.vocab_size, c.hidden_size)
        self.embedding = normal(rngs, shape, ("vocab", "embed"), c.initializer_range, dtype)


class MaskEmbeddings(nnx.Module):
    """m_1 … m_k, what stands for the next k tokens (arXiv 2507.11851); of one alone, it stands for all of them."""

    def __init__(self, c: ModelConfig, count: int, *, rngs, dtype):
        self.embedding = normal(rngs, (count, c.hidden_size), (None, "embed"), c.initializer_range, dtype)

    def __call__(self, ranks: Any, dtype: Any) -> jax.Array:
        """[..., D] of ranks [...] from 0."""
        return self.embedding[...].at[ranks].get(mode="clip").astype(dtype)


class Sampler(nnx.Module):
    """Hidden states behind masks, each with the token before it in mind (arXiv 2507.11851, the sampler head).

    Two blocks Linear → SiLU → LayerNorm, 2D → D → D, on [embedding of the token before; hidden state of the mask]. The
    result goes to the decoder's own head.
    """

    def __init__(self, c: ModelConfig, *, rngs, dtype):
        size = c.hidden_size
        options = {"bias": True, "rngs": rngs, "dtype": dtype}
        self.first = Linear(2 * size, size, (None, "embed"), scale=(2 * size) ** -0.5, **options)
        self.second = Linear(size, size, (None, "embed"), scale=size**-0.5, **options)
        self.first_norm, self.second_norm = LayerNorm(size, dtype=dtype), LayerNorm(size, dtype=dtype)

    def __call__(self, before: jax.Array, hidden: jax.Array) -> jax.Array:
        """before, hidden [..., D] → [..., D]."""
        x = jnp.concatenate([before.astype(hidden.dtype), hidden], axis=-1)
        x = self.first_norm(jax.nn.silu(self.first(x)))
        return self.second_norm(jax.nn.silu(self.second(x)))


class Decoder(nnx.Module):
    """tokens → hidden states → logits.

    `layout="stacked"` holds the layers as one stack, run by `lax.scan` (training, checkpoints);
    `layout="list"` holds them one by one, run unrolled (decoding: slicing a stack inside the loop would copy it).
    """

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, layout: Layout = "stacked", param_dtype: Any = jnp.float32
    ):
        self.config = config
        self.embed_table = Embed(config, rngs=rngs, dtype=param_dtype)
        self.masks: MaskEmbeddings | None
        self.sampler: Sampler | None
        self.layers: Layer | nnx.List
        if layout == "stacked":
            self.layers = Layer(config, lead=(config.num_layers,), rngs=rngs, dtype=param_dtype)
        else:
            self.layers = nnx.List(Layer(config, rngs=rngs, dtype=param_dtype) for _ in range(config.num_layers))
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype=param_dtype)
        head = {"rngs": rngs, "scale": config.initializer_range, "dtype": param_dtype}
        axes = ("embed", "vocab")
        self.head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size, axes, **head)
        adapter, options = config.adapter, {"rngs": rngs, "dtype": param_dtype}
        self.masks = MaskEmbeddings(config, adapter.masks, **options) if adapter and adapter.masks else None
        self.sampler = Sampler(config, **options) if adapter and adapter.sampler else None

    @property
    def layout(self) -> Layout:
        return "stacked" if isinstance(self.layers, Layer) else "list"

    def embed(self, tokens: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        """Input embeddings [..., D] of token ids [...]."""
        # Over a mesh every device looks up its own columns of all tokens, so that the table is never gathered.
        tokens = constrain(tokens, *(None,) * tokens.ndim)
        found = self.embed_table.embedding[...][tokens].astype(dtype)
        return constrain(found, *(None,) * tokens.ndim, "embed")

    def __call__(
        self,
        tokens: jax.Array | None = None,
        *,
        embeddings: jax.Array | None = None,
        positions: jax.Array,
        attend: Attend,
        layer_states: Any = None,
        gate: Gate | None = None,
        dtype: Any = jnp.float32,
        remat: str | None = None,
    ) -> tuple[jax.Array, Any]:
        """Hidden states [N, S, D] after the final norm, and the new layer states.

        Args:
          tokens: [N, S] int32; or instead `embeddings` [N, S, D].
          positions: [N, S] int32, for the rotary embedding only.
          attend: (q [N,S,H,h], k [N,S,K,h], v [N,S,K,h], layer_state) → (mixed [N,S,H,h], new layer_state).
          layer_states: one pytree a layer: a sequence (list layout) or one pytree with a leading L axis (stacked).
          gate: where gated adapters act; None: nowhere. A model without them does not look at it.
          dtype: compute dtype; weights are cast where they are used, norms and softmax stay float32.
          remat: stacked layout only: name of a `jax.checkpoint_policies` member, or None to save everything.
        """
        if (tokens is None) == (embeddings is None):
            raise ValueError("give either tokens or embeddings")
        x = self.embed(tokens, dtype) if tokens is not None else embeddings.astype(dtype)  # type: ignore[union-attr]
        # Behind a barrier, or the compiler computes them anew in every layer.
        cos, sin = jax.lax.optimization_barrier(rope_angles(positions, self.config))
        if isinstance(self.layers, Layer):
            x, layer_states = _scan(self.layers, x, cos, sin, attend, layer_states, gate, remat)
        else:
            x, layer_states = _unroll(self.layers, x, cos, sin, attend, layer_states, gate)
        return self.final_norm(x), layer_states

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] in float32 of hidden states [..., D]. Row t predicts token t + 1."""
        return logits_of(hidden, *self.head_kernel)

    @property
    def head_kernel(self) -> tuple[jax.Array, int]:
        """(the last matrix, which of its axes is V): [D, V], or the embedding table [V, D] where they are tied."""
        if self.head is not None:
            return self.head.kernel[...], 1
        return self.embed_table.embedding[...], 0


def logits_of(hidden: jax.Array, kernel: jax.Array, vocab_axis: int) -> jax.Array:
    """Logits [..., V] in float32 of hidden states [..., D]; kernel [D, V], or [V, D] with vocab_axis 0."""
    contract = (((hidden.ndim - 1,), (1 - vocab_axis,)), ((), ()))
    return jax.lax.dot_general(hidden, kernel.astype(hidden.dtype), contract, preferred_element_type=jnp.float32)


def _scan(stack: Layer, x, cos, sin, attend, layer_states, gate, remat):
    graphdef, weights = nnx.split(stack)

    def body(x, slice_):
        layer_weights, state = slice_
        x = constrain(x, "batch", None, None)
        return nnx.merge(graphdef, layer_weights)(x, cos, sin, attend, state, gate)

    if remat is not None:
        body = jax.checkpoint(body, policy=getattr(jax.checkpoint_policies, remat), prevent_cse=False)
    return jax.lax.scan(body, x, (weights, layer_states))


def _unroll(layers: Sequence[Layer], x, cos, sin, attend, layer_states, gate):
    states = [None] * len(layers) if layer_states is None else layer_states
    new_states = []
    # Rows flattened for all layers: with two leading axes XLA:TPU changes between the layouts of both in every layer.
    shape = x.shape
    x = x.reshape(-1, shape[-1])
    for layer, state in zip(layers, states, strict=True):
        x, state = layer(x, cos, sin, attend, state, gate)
        new_states.append(state)
    return x.reshape(shape), new_states
