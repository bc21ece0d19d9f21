"""Samplers: they decide which positions become final in a step, and with which tokens."""
