"""What the options of `remask_lab.arguments` come to: models, requests, and files of results."""
