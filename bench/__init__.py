"""Measures the product. `whippet bench` is its command, `python -m bench.NAME` what developers need."""
