"""Writes a checkpoint again in another public weight format, streaming and resumable."""
