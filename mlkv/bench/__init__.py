"""Benchmarks that users run on their own machines: `mlkv bench ...`."""
