"""Writes the tiny random models of tests/golden and what transformers computes with them.

    python tests/golden/make_golden.py        (needs torch; the tests that use the files do not)

Biases and norms are perturbed: their initial zeros and ones would hide mistakes.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).parent
COMMON = {"vocab_size": 96, "hidden_size": 48, "max_position_embeddings": 256, "eos_token_id": 1, "pad_token_id": 0,
          "bos_token_id": None, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
MODELS = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**COMMON, intermediate_size=80, num_hidden_layers=2,
                                            tie_word_embeddings=False), torch.bfloat16, "5GB"),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**COMMON, intermediate_size=80, num_hidden_layers=2, head_dim=16,
                                            tie_word_embeddings=True), torch.float32, "60KB"),
    "llama": (LlamaForCausalLM, LlamaConfig(**COMMON, intermediate_size=64, num_hidden_layers=3, rms_norm_eps=1e-5,
                                            rope_parameters=LLAMA3, tie_word_embeddings=True), torch.float32, "5GB"),
}  # fmt: skip


@torch.no_grad()
def main() -> None:
    for seed, (name, (cls, config, dtype, shard)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = cls(config).eval()
        for path, weight in model.named_parameters():
            scale = 0.3 if path.endswith("norm.weight") or path.endswith("bias") else 0.15
            weight.add_(scale * torch.randn_like(weight))
        model.generation_config = GenerationConfig(eos_token_id=[1, 2], pad_token_id=0)
        model.to(dtype).save_pretrained(HERE / name, max_shard_size=shard)
        # Read again: casting back would keep the rotary frequencies rounded.
        model = cls.from_pretrained(HERE / name, dtype=torch.float32).eval()
        tokens = torch.randint(3, 96, (2, 40))
        greedy = model.generate(tokens[:, :12], attention_mask=torch.ones(2, 12, dtype=torch.int64), do_sample=False,
                                max_new_tokens=24, min_new_tokens=24)  # fmt: skip
        np.savez_compressed(
            HERE / name / "expected.npz",
            tokens=tokens.numpy().astype(np.int32),
            logits=model(tokens).logits.numpy(),
            greedy=greedy.numpy().astype(np.int32),
        )


if __name__ == "__main__":
    main()
