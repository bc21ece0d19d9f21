"""`remask bench`: workloads, the policies to compare on them, the comparison itself, and its report."""
