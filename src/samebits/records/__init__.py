"""What the stages leave behind, as typed records: data card, run files, local log, provenance."""
