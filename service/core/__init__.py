"""Holds the use cases: valid requests, admission, the source of an answer, and its text. No gRPC, no protobuf."""
