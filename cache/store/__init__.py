"""Stores bytes by name, with an age limit: in memory or in Redis, behind breakers."""
