"""What this machine can do in 16 bits, and what stands in the way."""
