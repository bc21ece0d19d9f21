"""The page at `/`, and what it needs beside the API: its files, an example, and page allocators to try out."""
