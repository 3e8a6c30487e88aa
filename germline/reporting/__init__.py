"""What people see of a run: its progress, its report, its curves."""
