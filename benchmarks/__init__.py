"""Benchmarks: each number is a ratio to a named baseline that was measured in the same run."""
