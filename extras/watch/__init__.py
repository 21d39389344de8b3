"""Watches a run for what looks wrong."""
