"""One call: interceptors, metadata, statuses, and the messages that it receives and sends."""
