"""Converts token ids to token ids. Knows no text, no gRPC and no Redis client."""
