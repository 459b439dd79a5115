"""DeepSeek-V2 and V2-Lite: latent attention, experts chosen by softmax."""
