"""``python -m cacheloader_daemon.simulator``: one JSON object of settings in, one forecast out.

The way in for programs that may not import the daemon. The settings are those of ``Settings``; ``"remedy": true`` asks
for a cache size that would remove the stall as well. Ends with 0, or with 2 and a sentence for settings that cannot be.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from cacheloader.errors import ConfigError
from cacheloader_daemon.simulator.forecast import enough_cache, forecast
from cacheloader_daemon.simulator.settings import Settings

if TYPE_CHECKING:
    from typing import TextIO


def main(source: TextIO, sink: TextIO) -> int:
    """Read settings, simulate, write."""
    try:
        asked = dict(json.load(source))
        wants_remedy = asked.pop("remedy", False)
        settings = Settings.from_mapping(asked)
    except (ValueError, TypeError, ConfigError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    found = forecast(settings)
    answer = found.to_dict()
    if wants_remedy:
        answer["enough_cache_bytes"] = enough_cache(settings, found)
    json.dump(answer, sink)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.stdin, sys.stdout))
