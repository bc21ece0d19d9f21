"""How sure a model must be of a token to write it: what a threshold costs in right answers, and saves in passes."""
