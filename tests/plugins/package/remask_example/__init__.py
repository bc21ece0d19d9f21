"""A cache policy and a model family for remask, as another package brings them."""
