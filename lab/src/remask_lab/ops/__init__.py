"""The profile of a policy's operations: timers, FLOP counts, the machine's roofline, and their picture."""
