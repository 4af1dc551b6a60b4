"""Models and programs with a policy built in."""
