"""Speculation as captured CUDA graphs: a draft verified, and the next one proposed, without the host."""
