"""The settings tree: its definition, its leaves, and the sources of their values."""
