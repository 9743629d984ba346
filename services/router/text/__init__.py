"""Text of one model: tokenizer, chat template, incremental detokenisation, stop strings. Synchronous and free
of I/O except for reading the model's folder. Imported by `formats`, `tokenization` and `lifecycle`."""
