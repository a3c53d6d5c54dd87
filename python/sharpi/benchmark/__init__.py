"""What `sharpi bench` and the scripts in `benchmarks` measure with."""

from sharpi.benchmark.steps import Benchmark
from sharpi.benchmark.streams import MeasuredStreams, again_share, measure_streams

__all__ = ["Benchmark", "MeasuredStreams", "again_share", "measure_streams"]
