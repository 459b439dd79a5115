"""gpt-oss: stacked experts with biases, clamped SwiGLU, attention sinks, windows."""
