"""Implements the protocol of `protos/whippet/v1`."""
