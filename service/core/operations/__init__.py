"""What the admin service does: drain, profile and reload; and the cache folder of this process."""
