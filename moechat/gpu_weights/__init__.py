"""Weights on a torch device, and what prefill and decode both compute there."""
