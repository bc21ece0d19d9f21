"""Groups of command-line options that several commands and subjects share, and what they come to."""
