"""fitune: fine-tune large language models within the memory you have."""

__version__ = "0.1.0"
