"""Products of matrices in 8 bits, and the rules that ask for them."""
