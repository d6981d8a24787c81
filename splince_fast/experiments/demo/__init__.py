"""The demonstration: erasing stereotypes from a language model, keeping factual gender."""
