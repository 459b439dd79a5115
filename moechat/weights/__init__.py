"""Where the weights live: checkpoint files, checked and mapped in place."""
