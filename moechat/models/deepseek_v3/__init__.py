"""DeepSeek-V3: config.json to dimensions, and the table of tensors."""
