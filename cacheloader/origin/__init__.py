"""Remote stores behind one small protocol. Engines are never imported by a training process (they hang after fork)."""
