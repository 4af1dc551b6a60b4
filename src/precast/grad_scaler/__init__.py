"""Dynamic loss scaling: `scaler.GradScaler` and its parts.

Data flows one way: gradients, found_inf, a step or none, an event, the step history, a diagnosis, the next scale.
"""
