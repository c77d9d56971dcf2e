"""Token ids in, token ids out. Knows no text, no gRPC and no Redis client."""
