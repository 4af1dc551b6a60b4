"""Documents of runs, and the reports that are made of them."""
