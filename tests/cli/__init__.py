"""The command line, and programs that run under `precast run`."""
