"""Quantized weights: reads, makes and judges them. Pure torch, runs without a GPU, imports nothing of ours."""
