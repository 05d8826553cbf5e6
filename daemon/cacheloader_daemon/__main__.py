"""``python -m cacheloader_daemon``."""

import sys

from cacheloader_daemon.garbage import no_collection

with no_collection():
    from cacheloader_daemon.cli import main

if __name__ == "__main__":
    sys.exit(main())
