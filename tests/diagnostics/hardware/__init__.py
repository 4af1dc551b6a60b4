"""`precast doctor`: what a machine can do in each dtype."""
