"""Chunks of prompts as captured CUDA graphs."""
