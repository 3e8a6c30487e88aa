"""Germline trains ordinary PyTorch modules by evolution, on one machine or on any mix of machines."""

__version__ = "0.1.0.dev0"
