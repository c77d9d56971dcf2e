"""A server under callers and trouble for as long as one likes, and whether every request ended once and rightly."""
