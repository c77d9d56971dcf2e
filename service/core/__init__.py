"""The use cases: a valid request, who is let in, where its answer comes from, and its text. No gRPC, no protobuf."""
