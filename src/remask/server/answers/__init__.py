"""Answers: their objects, as the OpenAPI document tells of them, and what makes them of the engine's events."""
