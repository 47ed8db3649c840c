"""A campaign of faults against the kit: what was tried, what held, and how to see each failure again."""
