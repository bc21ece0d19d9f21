"""GGUF files: their headers, architectures and tokenizers."""
