"""Loads weights onto their device from a model folder, or makes them from its config alone."""
