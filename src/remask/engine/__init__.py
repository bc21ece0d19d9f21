"""The engine: requests in, plans packed into passes, results out."""
