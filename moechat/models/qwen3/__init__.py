"""Qwen3: dense, q and k normed by head."""
