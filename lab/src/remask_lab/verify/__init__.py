"""`remask verify`: a checkpoint as remask computes it, against other code that computes it, in another process."""
