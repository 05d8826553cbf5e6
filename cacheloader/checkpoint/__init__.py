"""Checkpoints that can be trusted: a thin layer on ``torch.distributed.checkpoint``.

What torch calls done (``.metadata`` exists) is not yet a checkpoint. A save here ends with a commit record, written
last, that names every file with its size and checksum; a restart takes the newest one whose files match it and says why
it passed over the others.
"""
