"""Self-test of everything that ``exact`` trusts a device with, against results of a CPU."""
