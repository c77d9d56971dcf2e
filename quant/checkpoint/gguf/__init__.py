"""Reads GGUF, the file format of llama.cpp, as if it were a model folder.

kinds       block types of tensors: how many numbers a block holds in how many bytes
header      reads metadata and positions of tensors, checked against limits and the file's length
config      converts metadata to config.json and generation_config.json
vocabulary  converts metadata to tokenizer.json, tokenizer_config.json and chat templates; `sentencepiece` derives
            merges from scores
names       maps the names of tensors to those in a folder
file        combines the above into the text files and the table of tensors of one GGUF file
blocks      converts blocks of numbers to the weights of `forms`
tensors     reads the tensors of a file, memory-mapped

Only `blocks` and `tensors` need torch.
"""
