"""The options of each command: one file a command. Nothing here imports PyTorch or NumPy, so that help and errors of
the command line cost no time."""
