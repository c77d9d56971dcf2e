"""What stands around every call: ports, who calls, status, health."""
