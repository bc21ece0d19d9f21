"""Cache policies and a remasking rule from research, for remask."""
