"""Replicas of one model on many machines: routing by prefix, and the Ray Serve application."""
