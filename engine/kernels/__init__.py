"""CUDA kernels of decoding and prefill, and the only place with CUDA source. One op is one `.cu`, one typed wrapper
that prepares its launches, and one function of `reference`.

A step of up to eight rows is a chain of launches over state at fixed addresses: per layer `linear` (queries, keys,
values), `attention`, `linear_residual` (output), `gate_up`, `linear_residual` (down); then `head`, which chooses tokens
that are greedy or by temperature alone, or else the four stages of `sampling`; then `advance`, which reports to the
host and embeds the next step's tokens. `engine.model.layers.few_rows` makes the chain; an executor captures it as often
as a graph is to hold steps. Steps of many rows and prompts put other kernels between products of torch or `gemm`
(`rows`, `prefill`, `batch_attention`, `batch_sampling`).

Launches overlap (programmatic dependent launch; below compute capability 9.0 `ChainPlan.dependent` must be false),
under three rules that the kernels keep:
- before its wait a kernel reads weights, and state that only `advance` or the host changes;
- every launch has blocks that wait, so when it ends, whatever ran before it has ended too;
- the first kernel of a step lets its successor start only after its own wait, so that everything of the step after it
  may rely on `advance` having ended.

The host may change state (tokens, positions, pages, stops, sampling) between two graph launches, in stream order. Pages
must be there before a position reaches them, and no row may outgrow `ChainPlan.longest`: the attention kernel traps.

A row's result does not depend on the other rows nor on their number.
"""
