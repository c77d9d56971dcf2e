"""What varies between models beyond their sizes, so that a walk over the layers can refuse what it does not compute.

A new family names its features here; each walk lists the features that it computes.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from quant.checkpoint.config import ModelConfig


class Feature(StrEnum):
    """The value names the feature in messages."""

    GELU = "a gate by GELU"
    OUTPUT_NORMS = "norms of what attention and MLP compute"
    SCALED_EMBEDDING = "a scaled embedding"
    WINDOW_ROPE = "rotary angles of their own in layers with a window"


def features(config: ModelConfig) -> frozenset[Feature]:
    """Returns what the model needs beyond norms, projections, biases, windows and a gate by SiLU."""
    needed = {
        Feature.GELU: config.activation == "gelu",
        Feature.OUTPUT_NORMS: config.output_norms,
        Feature.SCALED_EMBEDDING: config.embedding_scale != 1.0,
        Feature.WINDOW_ROPE: config.window_rope is not None,
    }
    return frozenset(feature for feature, found in needed.items() if found)


def why_not(config: ModelConfig, computed: Collection[Feature] = ()) -> str | None:
    """Returns why a walk that computes these features cannot serve the model, or None."""
    lacking = sorted(features(config) - set(computed))
    return f"the model has {lacking[0]}, which the kernels do not compute" if lacking else None
