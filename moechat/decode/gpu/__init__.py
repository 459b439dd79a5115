"""Hybrid decode: a torch device has all but the routed experts, which the CPU computes."""
