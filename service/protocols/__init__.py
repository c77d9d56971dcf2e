"""One folder a protocol: parse, render, servicer."""
