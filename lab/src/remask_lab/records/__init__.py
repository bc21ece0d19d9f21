"""What all measurements read and write: result files, local data, machine facts, intervals, and Markdown tables."""
