"""Where an answer comes from: a cache, a generation that others read along, or the engine."""
