"""Identifies callers: tokens, certificates and tenants."""
