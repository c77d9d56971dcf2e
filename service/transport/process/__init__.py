"""Maintains a process that speaks gRPC: garbage collection, heap, descriptors."""
