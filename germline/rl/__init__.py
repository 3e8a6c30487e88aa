"""Reinforcement learning: environments of Gymnasium as an objective of a population."""
