"""Load on a running server, and what it answers under it."""
