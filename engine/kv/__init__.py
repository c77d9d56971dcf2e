"""Keys and values: pages, the prefix index over them, the shared tier beyond the device, and their number."""
