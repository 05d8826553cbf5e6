"""cacheloader: shards from object storage, cached once per node, read in an exactly resumable order by PyTorch."""

__version__ = "0.1.0"
