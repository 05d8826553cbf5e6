"""The wire between a training process and the node daemon: messages, their encoding, the version rule. No sockets."""
