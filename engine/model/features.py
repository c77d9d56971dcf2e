"""What varies between families beyond sizes, so that a walk over the layers can refuse by name what it lacks.

A new family names its features here; each walk lists those that it computes, and `eager` computes all. Scales, offsets
of norms and the unit of the residual stream are no features: loading folds them into norms and rotary tables. Soft
caps, experts and partly rotated heads are refused where a config is read.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Final

from quant.checkpoint.config import ModelConfig


class Feature(StrEnum):
    """Values name features in messages."""

    BIASES = "biases of products"
    HEAD_NORMS = "norms of queries and keys"
    WINDOWS = "windows of attention"
    WIDE_HEAD_NORMS = "norms of all heads as one"
    NO_INPUT_NORMS = "no norms of what attention and MLP read"
    GELU = "a gate by GELU"
    OUTPUT_NORMS = "norms of what attention and MLP compute"
    SCALED_EMBEDDING = "a scaled embedding"
    WINDOW_ROPE = "rotary angles of their own in layers with a window"


# What our kernels compute.
FUSED: Final = frozenset((Feature.BIASES, Feature.HEAD_NORMS, Feature.WINDOWS, Feature.SCALED_EMBEDDING))


def features(config: ModelConfig) -> frozenset[Feature]:
    """What the model needs beyond products, norms before them, attention and a gate by SiLU."""
    needed = {
        Feature.BIASES: config.qkv_bias or config.output_bias or config.mlp_bias,
        Feature.HEAD_NORMS: config.qk_norm,
        Feature.WINDOWS: any(config.windows),
        Feature.WIDE_HEAD_NORMS: config.wide_qk_norm,
        Feature.NO_INPUT_NORMS: not config.input_norms,
        Feature.GELU: config.activation == "gelu",
        Feature.OUTPUT_NORMS: config.output_norms,
        Feature.SCALED_EMBEDDING: config.embedding_scale != 1.0,
        Feature.WINDOW_ROPE: config.window_rope is not None,
    }
    return frozenset(feature for feature, found in needed.items() if found)


def why_not(config: ModelConfig, computed: Collection[Feature] = FUSED) -> str | None:
    lacking = sorted(features(config) - set(computed))
    return f"the model has {lacking[0]}, which the kernels do not compute" if lacking else None
