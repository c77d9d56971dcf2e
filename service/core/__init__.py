"""The use cases: valid requests, admission, where an answer comes from, its text. No gRPC, no protobuf."""
