"""Computes steps: the registry of executors, the router, the runner, and the state that executors share."""
