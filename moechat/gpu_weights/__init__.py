"""Weights as a GPU computes with them: stored bytes, their decoders, and products."""
