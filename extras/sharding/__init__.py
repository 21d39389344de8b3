"""Spreads models over workers: FSDP2's shards, tensor parallelism, and offload to main memory."""
