"""The device halves of policies: what their layer hooks do between the layers of a pass."""
