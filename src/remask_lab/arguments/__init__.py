"""Groups of command-line options that several commands and subjects share. Nothing here imports PyTorch or NumPy."""
