"""A whole model in float32, a layer at a time: weights are read when a layer's turn comes and dropped after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch

from quant.block import Block, BlockWeights, KeyValues, rms_norm
from quant.checkpoint.config import ModelConfig
from quant.checkpoint.formats import read_spec
from quant.checkpoint.forms import CheckpointLinear, Dense
from quant.checkpoint.linear import read_linear
from quant.checkpoint.opening import open_checkpoint
from quant.checkpoint.reading import load_config
from quant.checkpoint.source import FLOATS, TensorSource, check, fetch
from quant.checkpoint.spec import QuantSpec
from quant.checkpoint.tensors import EMBEDDING, FINAL_NORM, HEAD, layer_linears, layer_norms, layer_prefix
from quant.rotation import rotation

_CPU: Final = torch.device("cpu")
_TOKENS_AT_ONCE: Final = 4096  # activations of a layer in flight
_VOCAB_AT_ONCE: Final = 16384  # rows of the head widened to float32 together
_KEEP_BELOW: Final = 128 << 20  # bytes in float32: smaller models stay in memory between passes


class Decoder:
    """Reads any served format. Logits are those of the dequantized weights in float32."""

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        spec: QuantSpec | None,
        device: torch.device = _CPU,
    ) -> None:
        self.config = config
        self.device = device
        self._source = source
        self._spec = spec
        self._kept: dict[int, BlockWeights] = {}
        self._keep = _layer_bytes(config) * config.layers < _KEEP_BELOW
        self._tied = config.tied_head and f"{HEAD}.weight" not in source.names()
        check(source, EMBEDDING, (config.vocab_size, config.hidden_size), FLOATS)

    @staticmethod
    def open(path: Path, device: torch.device = _CPU) -> Decoder:
        checkpoint = open_checkpoint(path)
        return Decoder(checkpoint, load_config(path), read_spec(path, checkpoint.names()), device)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """int [S, T] -> float32 [S, T, hidden]."""
        table = self._source.tensor(EMBEDDING)
        scale = self.config.embedding_scale
        if self.config.embedding_scale_rounded:
            scale = float(torch.tensor(scale, dtype=table.dtype))
        return table[ids.long().cpu()].float().mul_(scale).to(self.device)

    def layer(self, index: int) -> BlockWeights:
        """One layer's tensors in float32, by their names within the layer. Norms are what they multiply by, though a
        family may store them less one."""
        if index not in self._kept:
            weights = self._read_layer(index)
            if not self._keep:
                return weights
            self._kept[index] = weights
        return self._kept[index]

    def block(self, index: int, positions: int) -> Block:
        window = self.config.windows[index]
        rope = self.config.rope if window is None else self.config.window_rope or self.config.rope
        return Block(self.config, window, rotation(rope, positions, self.device))

    def hidden(self, ids: torch.Tensor, progress: Callable[[int, int], None] | None = None) -> torch.Tensor:
        """int [S, T] -> the head's input, float32 [S, T, hidden]. `progress` gets how much is done, of how much."""
        x = self.embed(ids)
        together = list(batches(*ids.shape))
        total = self.config.layers * len(together)
        for index in range(self.config.layers):
            block, weights = self.block(index, ids.shape[1]), self.layer(index)
            for number, rows in enumerate(together, start=1):
                x[rows] = block.forward(weights, x[rows])
                if progress is not None:
                    progress(index * len(together) + number, total)
        return self.finish(x)

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        weight = fetch(self._source, FINAL_NORM, (self.config.hidden_size,), FLOATS)
        gain = (weight.float().to(self.device) + self.config.norm_offset) * self.config.logit_scale
        return rms_norm(x, gain, self.config.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [..., hidden] -> float32 [..., vocab]."""
        head = self._head()
        out = torch.empty(*hidden.shape[:-1], self.config.vocab_size, device=self.device)
        for first in range(0, out.shape[-1], _VOCAB_AT_ONCE):
            rows = slice(first, first + _VOCAB_AT_ONCE)
            out[..., rows] = hidden @ head[rows].to(self.device).float().T
        return out

    def logits_backward(self, gradients: torch.Tensor) -> torch.Tensor:
        """Gradients of logits [..., vocab] -> of what the head reads, [..., hidden]."""
        head = self._head()
        out = torch.zeros(*gradients.shape[:-1], self.config.hidden_size, device=self.device)
        for first in range(0, gradients.shape[-1], _VOCAB_AT_ONCE):
            rows = slice(first, first + _VOCAB_AT_ONCE)
            out += gradients[..., rows] @ head[rows].to(self.device).float()
        return out

    def generate(self, prompts: torch.Tensor, steps: int, pick: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """int [S, P] -> int64 [S, P + steps]; `pick` turns logits [S, vocab] into ids [S]."""
        ids = prompts.long().to(self.device)
        past = [KeyValues() for _ in range(self.config.layers)]
        fresh = ids
        for _ in range(steps):
            x = self.embed(fresh)
            for index, kept in enumerate(past):
                x = self.block(index, ids.shape[1]).forward(self.layer(index), x, kept)
            fresh = pick(self.logits(self.finish(x[:, -1]))).unsqueeze(1)
            ids = torch.cat((ids, fresh), dim=1)
        return ids

    def _head(self) -> torch.Tensor:
        if self._tied:
            return self._source.tensor(EMBEDDING)
        weight = read_linear(self._source, HEAD, self._spec, self.config.hidden_size, self.config.vocab_size).weight
        return weight.weight if isinstance(weight, Dense) else weight.dequantize(torch.bfloat16)

    def _read_layer(self, index: int) -> BlockWeights:
        prefix = layer_prefix(index)
        device = self.device
        weights: BlockWeights = {}
        for name, size in layer_norms(self.config).items():
            weights[f"{name}.weight"] = (
                fetch(self._source, f"{prefix}.{name}.weight", (size,), FLOATS).to(device).float()
                + self.config.norm_offset
            )
        for name, linear in self.linears(index):
            weights[f"{name}.weight"] = linear.weight.dequantize(torch.float32).to(device)
            if linear.bias is not None:
                weights[f"{name}.bias"] = linear.bias.to(device).float()
        return weights

    def linears(self, index: int) -> Iterator[tuple[str, CheckpointLinear]]:
        for name, (inputs, outputs) in layer_linears(self.config).items():
            yield name, read_linear(self._source, f"{layer_prefix(index)}.{name}", self._spec, inputs, outputs)


def batches(sequences: int, length: int) -> Iterator[slice]:
    """Slices of the sequences that keep the tokens in flight bounded."""
    step = max(1, _TOKENS_AT_ONCE // length)
    for first in range(0, sequences, step):
        yield slice(first, first + step)


def _layer_bytes(config: ModelConfig) -> int:
    return 4 * sum(inputs * outputs for inputs, outputs in layer_linears(config).values())
