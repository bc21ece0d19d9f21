"""The rule by which the BiCache paper finds depths: layers whose keys and values a question leaves similar."""
