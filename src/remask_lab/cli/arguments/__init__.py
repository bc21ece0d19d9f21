"""The options of each of the laboratory's commands. Nothing here imports PyTorch or NumPy."""
