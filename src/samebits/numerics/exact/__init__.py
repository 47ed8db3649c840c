"""``exact``: one set of bits for any host, device count and strategy; see docs/concepts/exact.md."""
