"""What `sharpi bench` and the scripts in `benchmarks` measure with."""

from sharpi.benchmark.steps import Benchmark
from sharpi.benchmark.streams import MeasuredStreams, measure_streams

__all__ = ["Benchmark", "MeasuredStreams", "measure_streams"]
