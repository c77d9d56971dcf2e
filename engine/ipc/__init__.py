"""The socket between front and engine process: its frames and events."""
