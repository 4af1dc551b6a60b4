"""What tests share: samples of operations, oracles, comparisons."""
