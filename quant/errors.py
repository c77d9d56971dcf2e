"""What keeps a model from being quantized or judged, beside faults of its folder (`quant.checkpoint.errors`)."""

from __future__ import annotations


class CannotQuantize(Exception):
    """A model, a job or a machine that the quantizer cannot work with. One line that says why and what to do."""
