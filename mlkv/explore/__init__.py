"""Exploration of the whole system: see world.py for what may happen, docs/explorer.md for how to use it."""
