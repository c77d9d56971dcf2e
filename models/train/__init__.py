"""Remakes the demo models from CPython's own standard library: `python -m models.train --help`."""
