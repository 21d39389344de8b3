"""Answers the prompts of files, and scores answers, without training."""
