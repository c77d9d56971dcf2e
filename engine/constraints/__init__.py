"""What an answer may look like: which tokens a grammar allows next, and which it forces. Without torch; the library is
loaded with the first constraint that is asked for."""
