"""Chooses token ids from logits."""
