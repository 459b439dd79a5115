"""Measurements of this machine: kernels and whole models."""
