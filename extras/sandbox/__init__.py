"""A sandbox for Python that a policy writes."""
