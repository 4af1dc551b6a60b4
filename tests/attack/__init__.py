"""The attack: scenarios that try to make precast say or do what is not so, each with an oracle; `make attack`."""
