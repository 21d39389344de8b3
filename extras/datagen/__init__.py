"""Adds rows to the training data while a run goes on."""
