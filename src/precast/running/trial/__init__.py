"""`precast try`: short runs of a program in float32 and in mixed precision, each in its own process, and compared."""
