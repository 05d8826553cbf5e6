"""The socket side: who may connect, what a message may do, and how much one client may ask of the daemon."""
