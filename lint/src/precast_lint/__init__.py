"""The static checker and fixer of mixed-precision programs, `precast-lint`: start reading at `checking/engine.py`.

Invariants: torch and precast are never imported; LibCST is loaded only when a file has to be parsed.
"""
