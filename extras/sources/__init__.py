"""Reads rows of packages: datasets:NAME of the Hugging Face hub, and reasoning_gym:TASK."""
