"""Reading of checkpoints, whichever form they have, into a loaded model."""
