"""Processes that work on callers' text, bounded in time and memory."""
