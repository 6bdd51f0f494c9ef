"""What a Ray user may need beside `Engine(backend="ray")`: a placement group as a string.

    os.environ[PLACEMENT_GROUP_VARIABLE] = placement_group_to_env(group)

An engine opened by this process, or by one that inherits its environment, then takes that group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from llmrt.errors import ConfigError

PLACEMENT_GROUP_VARIABLE = "RAY_PLACEMENT_GROUP"
"""The environment variable that names the placement group of engines."""

__all__ = ["PLACEMENT_GROUP_VARIABLE", "placement_group_from_env", "placement_group_to_env"]


def placement_group_to_env(group: Any) -> str:
    """Return a placement group as a string for an environment variable."""
    return json.dumps({"id": group.id.hex(), "bundles": group.bundle_specs})


def placement_group_from_env(environ: Mapping[str, str] = os.environ) -> Any | None:
    """Return the group that the environment names, without looking it up; None without one.

    Raises:
        ConfigError: the variable holds something else.
    """
    text = environ.get(PLACEMENT_GROUP_VARIABLE)
    if not text:
        return None
    try:
        value = json.loads(text)
        group_id = import_module("ray").PlacementGroupID(bytes.fromhex(value["id"]))
        bundles = [dict(bundle) for bundle in value["bundles"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"The environment variable {PLACEMENT_GROUP_VARIABLE} holds {text!r}, not what "
            f"llmrt.ray.placement_group_to_env() returns ({type(error).__name__}: {error})."
        ) from error
    return import_module("ray.util.placement_group").PlacementGroup(group_id, bundles)
