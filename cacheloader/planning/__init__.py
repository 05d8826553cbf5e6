"""``cacheloader plan``: what a cache of this size will read, wait and write, before the run."""
