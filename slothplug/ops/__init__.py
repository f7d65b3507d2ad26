"""The built-in operations, each a plugin like anybody's: how its sites are found, proved and served."""

BUILT_IN = ("rms_norm", "glu", "rotary", "head", "lora")
"""The packages here that are registered, first to last."""
