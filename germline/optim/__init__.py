"""Optimizers, fitness shaping and schedules: what turns the scores of a generation into a step."""
