"""What developers of precast run beside its tests; not part of the package."""
