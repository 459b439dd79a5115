"""What a person sees and types: the chat, the streams of an answer, keys and interrupts."""
