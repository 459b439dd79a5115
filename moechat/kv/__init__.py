"""What prefill hands to decode: packets, the bounded channel, the session's cache and timeline."""
