"""Files of the stages as typed records: data card, run files, local log, provenance."""
