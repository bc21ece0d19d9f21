"""The page at `/docs`: the endpoints and their fields, read from `/openapi.json`. It loads nothing from other hosts."""
