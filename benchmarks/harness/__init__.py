"""What all scenarios share: running contestants in turn, measuring them, and writing the report."""
