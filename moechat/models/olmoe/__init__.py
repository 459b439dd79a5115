"""OLMoE: every layer has experts; q and k are normed over the whole row."""
