"""The laboratory: everything that measures remask or draws what was measured."""
