"""What a model is: its dimensions and its tensors, read from a checkpoint folder."""
