"""Request bodies: the fields that are supported, by the names of the APIs that they come from. Any other is refused."""
