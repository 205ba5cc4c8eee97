"""Version of the package and of its public API."""

__version__ = "0.1.0"
