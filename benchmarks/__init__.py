"""Benchmarks: timings in turn in one run, as medians and ratios. `python -m benchmarks.head`, `python -m benchmarks.sft_step`."""
