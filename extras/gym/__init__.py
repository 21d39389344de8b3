"""Writes the observations of any gymnasium space as text, and plays environments in processes of their own."""
