"""Trains LoRA's matrices in place of all weights."""
