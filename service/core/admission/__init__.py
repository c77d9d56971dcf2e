"""Decides which request may start when: limits, quotas, the fair queue and the slots."""
