"""The page at `/`: its files, and the page allocators that its users try out."""
