"""Benchmarks: the real trainers and the bare operations, beside the peers, in one run."""
