"""Who runs, how far and in which order, and the step as data. No torch."""
