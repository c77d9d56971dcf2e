"""Qwen3 a sequence at a time in torch's own operations, each rounded to one type as transformers rounds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional


class PlainQwen3:
    """All weights and activations of one type; norms, rotation angles and softmax are worked out in float32."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        files = sorted(folder.glob("*.safetensors"))
        self._held = {name: held.to(device, dtype) for file in files for name, held in load_file(file).items()}
        self._dtype, self._device = dtype, device

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Of the token after each: float32 [tokens, vocabulary]."""
        told, config = self._held, self.config
        hidden = told["model.embed_tokens.weight"][torch.tensor(ids, device=self._device)]
        angles = self._angles(len(ids))
        for layer in range(config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            hidden = hidden + self._attention(at, self._norm(hidden, f"{at}input_layernorm"), angles)
            hidden = hidden + self._feed_forward(f"{at}mlp.", self._norm(hidden, f"{at}post_attention_layernorm"))
        head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
        return functional.linear(self._norm(hidden, "model.norm"), told[head]).float()

    def _norm(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return self._held[f"{name}.weight"] * wide.to(self._dtype)

    def _angles(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.config["head_dim"]
        base = self.config["rope_theta"] ** -(torch.arange(0, size, 2, device=self._device).float() / size)
        turned = torch.outer(torch.arange(tokens, device=self._device).float(), base).repeat(1, 2)
        return turned.cos().to(self._dtype), turned.sin().to(self._dtype)

    def _attention(self, at: str, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        config, (cos, sin) = self.config, angles
        parts = {}
        for part in "qkv":
            product = functional.linear(hidden, self._held[f"{at}self_attn.{part}_proj.weight"])
            heads = product.view(len(hidden), -1, config["head_dim"])
            if part != "v":
                heads = self._norm(heads, f"{at}self_attn.{part}_norm").transpose(0, 1)
                low, high = heads.chunk(2, -1)
                heads = (heads * cos + torch.cat((-high, low), -1) * sin).transpose(0, 1)
            parts[part] = heads.transpose(0, 1)
        shared = config["num_attention_heads"] // config["num_key_value_heads"]
        keys, values = (parts[part].repeat_interleave(shared, 0) for part in "kv")
        scores = parts["q"] @ keys.transpose(1, 2) * config["head_dim"] ** -0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=self._device).triu(1)
        shares = scores.masked_fill(later, float("-inf")).softmax(-1, dtype=torch.float32).to(self._dtype)
        seen = (shares @ values).transpose(0, 1).reshape(len(hidden), -1)
        return functional.linear(seen, self._held[f"{at}self_attn.o_proj.weight"])

    def _feed_forward(self, at: str, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = (functional.linear(hidden, self._held[f"{at}{name}_proj.weight"]) for name in ("gate", "up"))
        return functional.linear(functional.silu(gate) * up, self._held[f"{at}down_proj.weight"])
