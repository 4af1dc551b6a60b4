"""Shows what `precast.tune` finds, how long it takes, and how good it is beside what there is without it."""
