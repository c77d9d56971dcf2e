"""Serves the console: one page on the metrics port, its state as JSON, and two methods of whippet.v1."""
