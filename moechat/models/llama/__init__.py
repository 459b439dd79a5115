"""Llama 1 to 3.3 and what has its layout: dense, no norms of q and k."""
