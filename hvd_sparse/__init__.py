"""Sparse and compressed gradient exchange for Horovod."""

__version__ = "0.1.0"
