"""Decisions measured: questions whose truth is known, how often and how surely they are answered, and how fast."""
