"""Which sample comes next: pure arithmetic on (seed, epoch, world, position)."""
