"""Speculative decoding: what may follow is guessed, and several guesses are verified in one step."""
