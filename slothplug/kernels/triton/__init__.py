"""The Triton half of each operation. Import a module of this package only where Triton is installed."""
