"""Runs the engine process: its start, its loop of three verbs, building a model into it, and its report of a
machine."""
