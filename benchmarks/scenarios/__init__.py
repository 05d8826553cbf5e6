"""Scenarios: what is compared with what, over which data, from which store."""
