"""What happened and why: operations, numbers, plans, machines, and the report of a run."""
