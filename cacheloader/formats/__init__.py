"""Bytes of one shard to samples. A format opens nothing: it reads through the ``ByteSource`` it is given."""
