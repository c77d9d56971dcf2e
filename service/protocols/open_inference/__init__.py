"""Implements package inference: KServe's open inference protocol over gRPC, with Triton's streams; see
docs/protocols.md."""
