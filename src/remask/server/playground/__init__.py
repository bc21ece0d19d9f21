"""The page at `/`: its files, its example, and the page allocators that its users try out."""
