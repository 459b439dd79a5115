"""Qwen1.5 and Qwen2 with routed experts and a shared one behind a sigmoid gate."""
