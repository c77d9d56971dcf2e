"""Stores answers, keys and values in memory and Redis. Imports nothing of Whippet's other packages."""
