"""One token at a time, for one or many sessions: the decode thread and its native step."""
