"""A cluster of unlike machines: a coordinator with the run, and workers that come and go."""
