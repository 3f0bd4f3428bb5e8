"""Benchmarks: every figure that the project claims, and how to measure it again. `python -m benchmarks --help`."""
