"""The protocol of `protos/whippet/v1`."""
