"""From a model folder, or its config alone, to weights in their places."""
