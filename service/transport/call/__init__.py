"""Handles one call: interceptors, metadata, statuses, and its messages."""
