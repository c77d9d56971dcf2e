"""What stands around every call: ports, who calls, its message, status, health."""
