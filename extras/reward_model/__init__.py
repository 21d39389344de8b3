"""Scores responses by a learned reward model."""
