"""Decides which sequences run, how far and in which order, and defines the step as data. No torch."""
