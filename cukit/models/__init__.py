"""Decoders: parameters, the one forward pass, the ways to attend, and Hugging Face checkpoints."""
