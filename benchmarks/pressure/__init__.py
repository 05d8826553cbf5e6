"""A cache smaller than the data: bytes from the store and waiting, beside bound, LRU and simulator."""
