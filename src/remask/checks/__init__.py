"""Checks of what users give: values, the fields that are declared of them, kinds of models, and names of plug-ins."""
