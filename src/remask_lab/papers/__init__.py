"""The papers' tables: one definition a table, measured by one runner and printed beside the published numbers."""
