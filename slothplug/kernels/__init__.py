"""Tensor-facing operations, one file each, with a ``torch`` and a ``triton`` backend. Nothing here knows a model."""
