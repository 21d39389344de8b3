"""Tries a reward function on rows, without a model."""
