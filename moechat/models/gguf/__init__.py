"""Models in GGUF files: metadata to dimensions, and the table of tensors by GGUF's names."""
