"""What suits the tiny responses of these tests, of policies of other packages that are installed."""

from typing import Any

from remask.policies import policy_names

SETTINGS: dict[str, dict[str, Any]] = {
    name: settings for name, settings in {"elastic-cache": {"window": 4}}.items() if name in policy_names()
}
