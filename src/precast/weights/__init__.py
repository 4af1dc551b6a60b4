"""Low-precision copies of weights: cached for a region, or held between regions and checked for changes."""
