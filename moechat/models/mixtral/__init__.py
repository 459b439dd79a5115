"""Mixtral: Mistral with routed experts, weights of the chosen divided by their sum."""
