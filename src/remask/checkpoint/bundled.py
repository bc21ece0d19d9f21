"""The names of the models that come with the package."""

BUNDLED, BUNDLED_TRANSIT, BUNDLED_UNIFORM = "bundled", "bundled-transit", "bundled-uniform"
BUNDLED_MODELS = (BUNDLED, BUNDLED_TRANSIT, BUNDLED_UNIFORM)
