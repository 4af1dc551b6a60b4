"""The report and the documentation site in a real browser; the tests are skipped where there is no Chromium."""
