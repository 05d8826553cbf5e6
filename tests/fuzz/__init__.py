"""Frames that no client of ours would send, against the decoder and against a real daemon."""
