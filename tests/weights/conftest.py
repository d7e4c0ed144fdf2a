import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from marsjax.attention.dense import attend
from marsjax.models import Decoder, ModelConfig

GOLDEN = Path(__file__).parents[1] / "golden"


def causal_logits(model, tokens):
    """Logits [N, S, V] of whole sequences, at highest precision, compiled with the weights as arguments."""
    graphdef, params = nnx.split(model)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    mask = jnp.broadcast_to(positions[:, :, None] >= positions[:, None, :], (*tokens.shape, tokens.shape[1]))

    @jax.jit
    def run(params, tokens):
        model = nnx.merge(graphdef, params)
        see = lambda q, k, v, state: (attend(q, k, v, mask), state)  # noqa: E731
        return model.unembed(model(tokens, positions=positions, attend=see)[0])

    with jax.default_matmul_precision("highest"):
        return np.asarray(run(params, jnp.asarray(tokens)))


@pytest.fixture
def logits():
    return causal_logits


def arrays_of(model):
    return {path: np.asarray(variable[...]) for path, variable in nnx.state(model).flat_state()}


@pytest.fixture
def arrays():
    return arrays_of


class Copy:
    """A copy of a golden checkpoint in one file, to be damaged."""

    def __init__(self, path: Path, name: str):
        shutil.copytree(GOLDEN / name, path)
        self.path = path

    @property
    def weights(self) -> dict:
        return load_file(self.path / "model.safetensors")

    @weights.setter
    def weights(self, tensors: dict) -> None:
        save_file(tensors, self.path / "model.safetensors")

    def edit(self, file: str = "config.json", **fields) -> None:
        path = self.path / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture
def checkpoint(tmp_path):
    return lambda name="llama": Copy(tmp_path / name, name)


@pytest.fixture
def random_model():
    def make(**fields):
        shape = {"family": "qwen2", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2,
                 "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "tie_embeddings": False}  # fmt: skip
        layout = fields.pop("layout", "list")
        return Decoder(ModelConfig(**{**shape, **fields}), rngs=nnx.Rngs(0), layout=layout)

    return make


@pytest.fixture
def word_tokenizer():
    """A fast tokenizer of `size` tokens: [pad], [end], then words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(size=37):
        words = ["[pad]", "[end]"] + [f"w{i}" for i in range(2, size)]
        backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[pad]"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[end]", pad_token="[pad]")
        fast.chat_template = "{% for m in messages %}{{ m['content'] }} [end] {% endfor %}"
        return fast

    return make


@pytest.fixture
def subprocess_python():
    """Runs code with 8 CPU devices, which must be asked for before jax starts."""
    import os
    import subprocess
    import sys
    import textwrap

    def run(code: str) -> str:
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
               "PYTHONPATH": str(Path(__file__).parents[2])}  # fmt: skip
        result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run
