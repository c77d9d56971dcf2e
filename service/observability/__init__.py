"""Metrics, the port they are scraped from, and progress of loading."""
