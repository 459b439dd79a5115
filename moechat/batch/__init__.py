"""Many prompts on stdin, one JSON object a prompt on stdout."""
