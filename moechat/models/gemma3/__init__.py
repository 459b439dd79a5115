"""Gemma 3, text only: most layers slide and have a rope of their own, q and k normed."""
