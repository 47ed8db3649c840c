"""samebits: what dp and ddp buy on this host, and the same bits on any."""

__version__ = "0.1.0"
