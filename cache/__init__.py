"""Stores of answers and of keys and values: memory and Redis. Imports nothing of Whippet's other packages."""
