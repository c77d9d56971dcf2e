"""Drafts what may follow a sequence, and verifies several guesses in one step."""
