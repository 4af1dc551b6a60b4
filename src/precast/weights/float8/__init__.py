"""Matrix products in 8-bit floating point: formats, scales, the product with its gradients, and device support."""
