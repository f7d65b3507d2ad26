"""The flag in Axolotl's own schema."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, field_validator, model_validator

from slothplug.integrations.axolotl import conflicts
from slothplug.integrations.axolotl.translation import settings_of
from slothplug.integrations.hf.flag import flag_value
from slothplug.settings import Settings


class SlothplugAxolotlArgs(BaseModel):
    """What Axolotl adds to its schema for the plugin.

    Axolotl makes one class of its own schema and those of its plugins, by their bare names: this name must be used by
    nobody else.
    """

    use_fast_kernels: bool | dict[str, Any] | None = Field(
        default=None,
        json_schema_extra={
            "description": "Run the model on slothplug's fused kernels: true, false, or a mapping of settings.",
            "settings": Settings.model_json_schema(),
        },
    )

    @field_validator("use_fast_kernels", mode="before")
    @classmethod
    def _check_flag(cls, value: Any) -> Any:
        return value if value is None else flag_value(value)

    @model_validator(mode="after")
    def _check_resolved(self) -> SlothplugAxolotlArgs:
        """Refuses what is on by a default of Axolotl or of another plugin."""
        resolved = vars(self)
        chosen = settings_of(resolved)
        if chosen is not None:
            conflicts.refuse(chosen.settings, resolved, frozenset(self.model_fields_set))
        return self
