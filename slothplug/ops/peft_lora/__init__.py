"""PEFT's LoRA layers: what a call multiplies by, and twins for probes. Shared by the operations lora, glu and head."""
