"""The static checker and fixer behind `precast check` and `precast fix`: start reading at `engine.py`.

It never imports torch, and loads LibCST only when a file has to be parsed.
"""
