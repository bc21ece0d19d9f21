"""Other APIs beside OpenAI's completions. Their bodies become chat bodies, so all of them have one intake."""
