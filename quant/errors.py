"""Lists what keeps a model from being quantized or evaluated, beside faults of its folder
(`quant.checkpoint.errors`)."""

from __future__ import annotations


class CannotQuantize(Exception):
    """The quantizer cannot work with a model, a job or a machine. One line with the reason and the remedy."""
