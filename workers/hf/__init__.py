"""Sampling by the Hugging Face model itself: rows, their caches, and the drawing of tokens. Open it to change how the
engine `hf` generates; an engine of yours needs workers/rollout.py alone.
"""
