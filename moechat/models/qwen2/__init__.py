"""Qwen2, Qwen2.5: dense, biased q, k and v."""
