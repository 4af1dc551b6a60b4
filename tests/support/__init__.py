"""What tests share: samples, oracles, comparisons."""
