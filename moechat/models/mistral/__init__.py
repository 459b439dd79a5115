"""Mistral: dense, one window for all layers or none."""
