"""Shapes of published models, so that `marsjax plan` needs neither weights nor a network."""

from marsjax.models.config import Llama3Scaling, ModelConfig

_LLAMA_31 = Llama3Scaling(8.0, 1.0, 4.0, 8192)


def _qwen2(vocab, hidden, intermediate, layers, heads, kv_heads, tied) -> ModelConfig:
    return ModelConfig(
        "qwen2", vocab, hidden, intermediate, layers, heads, kv_heads, hidden // heads, tie_embeddings=tied
    )


def _qwen3(hidden, intermediate, layers, heads, tied) -> ModelConfig:
    return ModelConfig(
        "qwen3", 151936, hidden, intermediate, layers, heads, 8, 128, max_positions=40960, tie_embeddings=tied
    )


KNOWN = {
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen2(151936, 896, 4864, 24, 14, 2, True),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen2(151936, 1536, 8960, 28, 12, 2, True),
    "Qwen/Qwen2.5-3B-Instruct": _qwen2(151936, 2048, 11008, 36, 16, 2, True),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(152064, 3584, 18944, 28, 28, 4, False),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, False),
    "meta-llama/Llama-3.1-8B-Instruct": ModelConfig(
        "llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 5e5, _LLAMA_31, 1e-5, False
    ),
    "allenai/Llama-3.1-Tulu-3-8B-SFT": ModelConfig(
        "llama", 128264, 4096, 14336, 32, 32, 8, 128, 131072, 5e5, _LLAMA_31, 1e-5, False
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ModelConfig(
        "llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e5, None, 1e-5, True
    ),
}
