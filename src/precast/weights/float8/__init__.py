"""Products of matrices in 8-bit floating point: formats and scales, the product with its gradients, who has kernels."""
