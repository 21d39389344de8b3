"""Reads what is written for verl: command lines, yaml files, imports, managers and agent loops."""
