"""What to fetch, keep and drop: a pure machine. Events in, effects out; no clock, no socket, no file."""
