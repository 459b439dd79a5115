"""Gemma 2: softcaps, every other layer slides."""
