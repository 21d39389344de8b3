"""Corrects for rollouts whose probabilities are not the trainer's."""
