"""Computes faster what PyTorch and transformers compute: shared prompts, packed batches, the token head."""
