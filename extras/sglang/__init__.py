"""Samples from SGLang as the engine."""
