"""Finds a policy for one model on one machine: what runs where, what each choice costs, and which choice is best."""
