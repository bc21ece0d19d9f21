"""The names of the models that come with the package."""

BUNDLED, BUNDLED_TARIFF = "bundled", "bundled-tariff"
BUNDLED_TRANSIT, BUNDLED_UNIFORM = "bundled-transit", "bundled-uniform"
BUNDLED_MODELS = (BUNDLED, BUNDLED_TARIFF, BUNDLED_TRANSIT, BUNDLED_UNIFORM)
