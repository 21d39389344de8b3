"""Serves a model by the OpenAI API."""
