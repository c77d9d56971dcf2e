"""The engine process: its start, its loop of three verbs, how a model is built into it, what it says of a machine."""
