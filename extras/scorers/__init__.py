"""Processes that call a user's reward function and can be killed."""
