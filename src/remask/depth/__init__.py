"""Depth tables: in how many layers a model may read a shared prefix from the store, measured on requests."""
