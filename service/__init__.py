"""gRPC in, tokens out. No torch here."""
