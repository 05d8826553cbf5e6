"""Days of a daemon's life by the bytes that pass through it, not by the clock."""
