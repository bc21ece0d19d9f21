"""The names of the models that come with the package."""

BUNDLED, BUNDLED_GRADED, BUNDLED_TRANSIT = "bundled", "bundled-graded", "bundled-transit"
BUNDLED_UNIFORM = "bundled-uniform"
BUNDLED_MODELS = (BUNDLED, BUNDLED_GRADED, BUNDLED_TRANSIT, BUNDLED_UNIFORM)
