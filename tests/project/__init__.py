"""What is no part of the package: docs, site, benchmarks, examples, tools, layout."""
