"""Trains by examples: supervised fine-tuning."""
