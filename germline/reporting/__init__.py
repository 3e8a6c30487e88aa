"""Shows runs to people: their progress, reports and curves."""
