"""Programs that run under `precast run`."""
