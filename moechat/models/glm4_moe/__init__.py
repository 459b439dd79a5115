"""GLM-4.5 to 4.7: DeepSeek-V3's routing, heads rotated in part."""
