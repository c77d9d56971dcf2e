"""What does a step: the registry of executors, the runner that shares rows out, and the state that executors share."""
