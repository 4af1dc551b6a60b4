"""Policies attached to models: rules for modules, held weights, threads, devices and distributed training."""
