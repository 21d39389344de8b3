"""Draws prompts by how hard they are for the policy of the moment."""
