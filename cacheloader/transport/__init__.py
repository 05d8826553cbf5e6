"""How a training process gets shards: from the node daemon, straight from the origin, or from memory in tests."""
