"""Relays: processes that listen on the data port together, speak gRPC, and hand their calls to the front over a
socket."""
