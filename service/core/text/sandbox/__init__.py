"""Runs work on callers' text in processes bounded in time and memory."""
