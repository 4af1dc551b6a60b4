"""Measurements of precast beside PyTorch, in one process, interleaved."""
