"""The demo: erase stereotypes from a language model, and keep factual gender."""
