"""Shows all of one step on two prompts, without a weight change or a file."""
