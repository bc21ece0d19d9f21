"""Page accounting and the store of shared prefixes."""
