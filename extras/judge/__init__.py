"""Scores responses by a language model that is asked for its judgement."""
