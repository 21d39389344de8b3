"""Trains: data comes in, roles are called, advantages and losses are computed."""
