"""Measurements of the depths that audits earn: their quality, their cost, and how soon they follow other traffic."""
