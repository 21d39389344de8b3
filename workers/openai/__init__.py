"""The engine that asks an OpenAI-compatible server, the ways by which weights reach it, and the certificate, for every
engine, that they did. Open it if you train over a server, or if a sync of weights fails.
"""
