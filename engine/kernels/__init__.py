"""CUDA kernels of batch-1 decoding, and the only place with CUDA source. One op is one `.cu`, one typed wrapper that
prepares its launches, and one function of `reference`.

A step of up to eight rows is a chain of launches over state at fixed addresses: per layer `linear` (queries, keys,
values), `attention`, `linear_residual` (output), `gate_up`, `linear_residual` (down); then `head` and `advance`, which
chooses the tokens, tells the host and lays out the embeddings of the next step. `start` does the last part alone, once
for rows the host has just placed. `step.prepare_step` makes the whole chain as a tuple of `Launch`; a decoder keeps the
tuple, enqueues it inside a stream capture as many times as a graph is to hold steps, and replays the graph.

Launches overlap (programmatic dependent launch), under three rules that the kernels keep:
- before its wait a kernel reads weights, and state that only `advance` or the host changes;
- every kernel waits, so whatever ran before its predecessor has ended too;
- the first kernel of a step lets its successor start only after its own wait, so that everything of the step after it
  may rely on `advance` having ended.

A row's result does not depend on the other rows nor on how many there are.
"""
