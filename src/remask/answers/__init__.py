"""Answers of a special form: from what a request writes to its canvas, and from its result to the answer."""
