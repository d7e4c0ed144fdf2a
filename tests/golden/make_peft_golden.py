"""Writes an adapter made by the PEFT library for tests/golden/llama, and what PEFT computes with it.

python tests/golden/make_peft_golden.py     (needs torch, transformers and peft; the tests that use it do not)
"""

import json
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(HERE / "llama", dtype=torch.float32)
    targets = {"target_modules": r".*\.(q|v|o|down)_proj", "exclude_modules": ["o_proj"]}
    lora = LoraConfig(r=2, lora_alpha=3, use_rslora=True, task_type="CAUSAL_LM", **targets)
    model = get_peft_model(base, lora).eval()
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.add_(0.2 * torch.randn_like(weight))
    model.save_pretrained(HERE / "peft")
    (HERE / "peft" / "README.md").unlink()
    config = HERE / "peft" / "adapter_config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "llama"}, indent=2) + "\n"
    )
    tokens = torch.from_numpy(np.load(HERE / "llama" / "expected.npz")["tokens"][:1].astype(np.int64))
    np.savez_compressed(HERE / "peft" / "expected.npz", logits=model(tokens).logits.numpy())


if __name__ == "__main__":
    main()
