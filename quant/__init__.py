"""Reads, makes and evaluates quantized weights. Pure torch, runs without a GPU, imports nothing of ours."""
