"""Connectors for engines and libraries that people run. Each is imported only where its engine is."""
