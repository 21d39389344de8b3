"""PF-PPO: learns from rows that are drawn by their score."""
