"""Shipped tools: a calculator, a Python sandbox, search, GSM8K's check of an answer. Open it for examples of tools."""
