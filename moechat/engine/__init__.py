"""Ownership and lifetime: weights, threads, sessions, conversations."""
