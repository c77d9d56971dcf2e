"""Defines the settings tree, its leaves, and the sources of their values."""
