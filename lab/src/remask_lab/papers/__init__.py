"""`python -m remask_lab papers`: the papers' tables as data, one runner for all, and our results beside theirs."""
