"""Three walks over the layers of a model: `eager` (torch, any device), `few_rows` (a captured step of a few rows on a
GPU; `few_rows_cpu` in C) and `many_tokens` (prompts and wide batches on a GPU). `LayerForm` in
`quant.checkpoint.tensors` describes a layer; a walk refuses by name the `engine.model.features` that it does not
compute."""
