"""GGUF, the file format of llama.cpp, read as if it were a model folder.

kinds       block types of tensors: how many numbers a block holds in how many bytes
header      metadata and places of tensors, checked against bounds and the file's length
config      metadata as what a folder has in config.json and generation_config.json
vocabulary  metadata as tokenizer.json, tokenizer_config.json and chat templates; `sentencepiece` makes merges of scores
names       what a tensor is called in a folder
file        all of this together: the text files and the table of tensors of one GGUF file
blocks      blocks of numbers as weights of `forms`
tensors     the tensors of a file, mapped

Only `blocks` and `tensors` need torch.
"""
