"""Applies constraints of answers: which tokens a grammar allows next, and which it forces. Without torch."""
