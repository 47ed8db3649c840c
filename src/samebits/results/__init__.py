"""The comparison for people, from ``comparison.json`` alone: table, sentences, plots and a page."""
