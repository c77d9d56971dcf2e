"""What a process that speaks gRPC does for itself: garbage collection, heap, descriptors."""
