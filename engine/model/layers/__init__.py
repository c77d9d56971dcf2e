"""Five walks over the layers of a model: `eager` (torch, any device), `cpu_walk` (C, on a CPU), and on a GPU `few_rows`
(a captured step of a few rows), `many_tokens` (prompts and wide batches) and `portable` (every family). `LayerForm` in
`quant.checkpoint.tensors` describes a layer; a walk refuses by name the `engine.model.features` that it does not
compute."""
