"""Shipped simulated users: a script, GSM8K's, a model behind an endpoint. Open it for an example of a user."""
