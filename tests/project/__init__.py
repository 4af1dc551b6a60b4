"""What is not part of the package: documentation, site, benchmarks, examples, tools, and how the source is laid out."""
