"""Everything that touches argv, the standard streams as a whole, and the exit code."""
