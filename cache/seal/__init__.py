"""Names of entries and their encryption: key file, envelope, partitions of tenants."""
