"""Makes a Hugging Face folder of a checkpoint."""
