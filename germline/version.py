"""The version, in a place that every module may import."""

__version__ = "0.1.0.dev0"
