"""The one reader of model folders in the Hugging Face layout, for the engine and for the quantizers.

config       config.json as a checked `ModelConfig`; `rope` its positions, `angles` the frequencies they mean
tensors      names and shapes of the tensors that a config asks for
safetensors  the tensors of a folder, mapped from its shards and checked against their headers
formats      which quantization a folder has, by name; `detect` reads the dialects into a spec (`spec`)
linear       one linear layer of any format as a weight of `forms`; `awq`, `packed`, `bnb` each know one layout
digest       the SHA-256 of a folder
errors       what can be wrong with a folder

It imports nothing else of ours. `config`, `rope`, `tensors`, `spec`, `detect`, `formats` and `digest` need no torch.
"""
