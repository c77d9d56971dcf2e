"""The socket between front and engine process: its frames, and the events that they carry."""
