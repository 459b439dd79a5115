"""Qwen3 with routed experts: softmax over all, q and k normed by head."""
