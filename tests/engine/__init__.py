"""The kernels at the autocast keys, and the compilers that trace through them."""
