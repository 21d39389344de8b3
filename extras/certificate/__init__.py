"""Certifies after every sync that an engine samples from the weights in training."""
