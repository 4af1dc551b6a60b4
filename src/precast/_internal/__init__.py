"""What every package may use: files, locks, events, versions, containers, and how results are displayed."""
