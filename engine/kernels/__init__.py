"""Arithmetic. `reference` is the specification, in NumPy."""
