"""Implements the admin service's operations (drain, profile, reload) and finds the process's cache folder."""
