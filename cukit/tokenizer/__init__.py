"""Text <-> ids for a Hugging Face model folder: `tokenizers` for ids, jinja2's sandbox for the chat template.

The folder is untrusted: only files with fixed names are read, and a template can reach neither files nor attributes.
"""

from .streaming import Context, IncrementalDecoder, context_of, text_after
from .tokenizer import TOKENIZER_FILES, Tokenizer

__all__ = ["TOKENIZER_FILES", "Context", "IncrementalDecoder", "Tokenizer", "context_of", "text_after"]
