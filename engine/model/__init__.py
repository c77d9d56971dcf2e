"""One decoder-only transformer, driven by its configuration."""
