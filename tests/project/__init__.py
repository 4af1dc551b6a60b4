"""Tests of documentation, site, benchmarks, examples, tools, and the layout of the source."""
