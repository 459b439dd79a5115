"""DeepSeek-V3 and R1, Kimi K2, Moonlight: latent attention, experts by corrected sigmoids."""
