"""What is told of the server: metrics, their port, progress of loading."""
