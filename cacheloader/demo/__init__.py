"""``cacheloader demo``: the main job from end to end on this machine, with a real object store."""
