"""The node daemon: brings every shard that the node needs onto local disk, once, before it is needed."""
