"""The forms of answers, as the OpenAPI document tells them. The server makes its answers as plain JSON objects."""
