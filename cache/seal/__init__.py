"""Names entries and encrypts them: key file, envelope, partitions of tenants."""
