"""Prefill on a GPU: weights are streamed through it layer by layer. Imports torch."""
