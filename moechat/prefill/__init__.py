"""Many tokens at once: a prompt's new tokens become KV packets, layer by layer."""
