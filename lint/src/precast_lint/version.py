"""The version of precast-lint, alone, so that the build reads it without importing anything else."""

__version__ = "0.1.0"
