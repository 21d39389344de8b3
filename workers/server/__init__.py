"""The OpenAI-compatible API over one engine. Open it to change what `python -m training.main_server` serves."""
