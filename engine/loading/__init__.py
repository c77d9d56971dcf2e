"""From a model folder, or its config alone, to weights on their device."""
