"""One page about all that was measured in one call: every target, met or missed, and where its figures stand."""
