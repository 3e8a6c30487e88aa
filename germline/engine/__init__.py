"""A run: one session that asks, scores, tells and records, its journal, and what is read from it."""
