"""One text, checked and fixed until nothing changes; comments that silence findings."""
