"""What the families built on Qwen's architecture share in their configurations."""

from collections.abc import Mapping
from typing import Any

from remask.models.families.fields import Fields


def rope_theta(fields: Fields, raw: Mapping[str, Any]) -> float:
    """The rotary base: `rope_theta`, or `rope_parameters`, where newer writers of the same file put it."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = raw.get(key)
        if scaling is not None and not (
            isinstance(scaling, Mapping) and scaling.get("rope_type", scaling.get("type")) == "default"
        ):
            raise fields.unfit(key, 'null, or an object of "rope_type": "default" (no scaling of positions)')
    if raw.get("rope_theta") is None and raw.get("rope_parameters") is not None:
        return Fields("config.json, 'rope_parameters'", raw["rope_parameters"]).number("rope_theta")
    return fields.number("rope_theta")
