"""Three walks over the layers of a model: `eager` (torch, any device), `few_rows` (a captured step of a few rows on a
GPU; `few_rows_cpu` in C) and `many_tokens` (prompts and wide batches on a GPU). What a layer is, `LayerForm` in
`quant.checkpoint.tensors` describes; a walk refuses by name what `engine.model.features` lists and it does not compute.
"""
