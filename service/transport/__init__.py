"""Surrounds every call with ports, identity, message bounds, statuses and health."""
