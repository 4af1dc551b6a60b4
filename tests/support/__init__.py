"""Helpers of the tests: samples of operations, oracles, comparisons."""
