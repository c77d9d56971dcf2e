"""Who calls: tokens, certificates and tenants."""
