"""The engine that asks an OpenAI-compatible server, and the ways by which weights reach it. Open it if you train over a
server, or if a weight transfer fails.
"""
