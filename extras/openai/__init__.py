"""Samples from an OpenAI-compatible server as the engine."""
