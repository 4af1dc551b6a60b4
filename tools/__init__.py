"""Programs for developers of precast; not part of the package."""
