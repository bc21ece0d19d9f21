"""Remasking rules: which noisy positions of a block become final in a step, and which stay masked. NumPy only."""

from remask.remasking.rules import Remasking, Step, every_block
from remask.remasking.select import Chosen

__all__ = ["Chosen", "Remasking", "Step", "every_block"]
