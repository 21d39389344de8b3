"""A reward by the judgement of a language model, which is asked over an OpenAI-compatible API."""
