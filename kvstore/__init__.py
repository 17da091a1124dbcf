"""One KV-cache store per node. The store may forget, but it may not invent."""

__version__ = "0.1.0"
