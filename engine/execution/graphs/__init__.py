"""Captured CUDA graphs behind four verbs: update, launch, poll and wait."""
