"""What the server counts, for Prometheus. Each server has a registry of its own, so that two in one process do not
mix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sharpi.serve.turns import Usage

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

Counts = Callable[[], Iterable[tuple[str, dict[str, Any]]]]
"""The names of the loaded models, and what their schedulers count (`Scheduler.counts`)."""

# By the name in `Scheduler.counts`. Values of those that a scheduler does not count are left out.
_GAUGES = {
    "waiting": ("requests_waiting", "Requests whose prompts wait for their turn"),
    "preparing": ("requests_preparing", "Requests whose prompts are being computed"),
    "writing": ("requests_running", "Requests whose answers are being written"),
    "shared_pages": ("shared_pages", "Pages of the KV cache that prompts with the same beginning find"),
    "spill_bytes": ("spill_bytes", "RAM with copies of pages"),
    "states_bytes": ("states_bytes", "RAM with copies of recurrent states"),
    "kv_usage": ("kv_cache_usage", "Part of the KV cache that is in use, 0 to 1"),
}
_COUNTERS = {
    "finished": ("requests_finished", "Requests that the scheduler has finished"),
    "refused": ("requests_refused", "Requests that the full queue refused"),
    "pauses": ("pauses", "How often a request gave its memory to others"),
    "steps": ("steps", "Steps that gave tokens"),
    "step_tokens": ("step_tokens", "Tokens that steps gave"),
    "step_seconds": ("step_seconds", "Seconds spent in steps"),
    "pieces": ("prompt_pieces", "Pieces of prompts that were computed"),
    "adopted_tokens": ("adopted_tokens", "Tokens of prompts that others had computed"),
    "spilled_pages": ("spilled_pages", "Pages copied from the KV cache, which had to give them up"),
    "restored_pages": ("restored_pages", "Pages brought back to the KV cache"),
    "written_copies": ("written_copies", "Pages and states written to the cache directory"),
    "loaded_copies": ("loaded_copies", "Pages and states read from the cache directory"),
    "piece_seconds": ("prompt_piece_seconds", "Seconds spent in pieces of prompts"),
    "step_host_seconds": ("step_host_seconds", "Seconds of the scheduler's own work for steps"),
    "step_hidden_seconds": ("step_hidden_seconds", "Those while the GPU was at work"),
    "piece_host_seconds": ("prompt_piece_host_seconds", "Seconds of the scheduler's own work for pieces of prompts"),
    "piece_hidden_seconds": ("prompt_piece_hidden_seconds", "Those while the GPU was at work"),
    "lost_tokens": ("lost_tokens", "Tokens computed again that pauses lost, or others who needed the memory"),
    "lost_seconds": ("lost_seconds", "Seconds of steps and pieces spent on them"),
    "answers_again_tokens": ("answers_again_tokens", "Tokens of answers computed again in later prompts"),
    "answers_again_seconds": ("answers_again_seconds", "Seconds of steps and pieces spent on them"),
    "cuts_again_tokens": ("cuts_again_tokens", "Tokens of prompts computed again after their last shared page"),
    "cuts_again_seconds": ("cuts_again_seconds", "Seconds of steps and pieces spent on them"),
}


class Metrics:
    """Counters and histograms, and gauges that are read when they are asked for."""

    def __init__(self, counts: Counts) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._requests = Counter("sharpi_requests", "Requests by endpoint and HTTP status; status 0 had no answer",
                                 ("api", "status"), registry=self._registry)
        self._seconds = Histogram("sharpi_request_seconds", "Seconds from a request to the end of its answer",
                                  ("api",), buckets=_SECONDS, registry=self._registry)
        self._tokens = {
            field: Counter(f"sharpi_{name}_tokens", text, ("model",), registry=self._registry)
            for field, name, text in (("prompt_tokens", "prompt", "Tokens of prompts"),
                                      ("cached_tokens", "cached", "Tokens of prompts that the cache had"),
                                      ("completion_tokens", "completion", "Tokens of answers"))}
        self._times = {
            field: Histogram(f"sharpi_{name}_seconds", text, ("model",), buckets=_SECONDS, registry=self._registry)
            for field, name, text in (("queued_seconds", "queue", "Seconds until a prompt's turn came"),
                                      ("first_token_seconds", "first_token", "Seconds until the first token"))}
        self._registry.register(_Schedulers(counts))

    def request(self, api: str, status: int, seconds: float) -> None:
        """A request has ended."""
        self._requests.labels(api, str(status)).inc()
        self._seconds.labels(api).observe(seconds)

    def turn(self, model: str, usage: Usage) -> None:
        """A turn has ended."""
        for field, counter in self._tokens.items():
            counter.labels(model).inc(getattr(usage, field))
        for figures in usage.figures:
            for field, times in self._times.items():
                seconds = figures.get(field)
                if seconds is not None:
                    times.labels(model).observe(seconds)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)


class _Schedulers(Collector):
    """What the schedulers of the loaded models count."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        found = list(self._counts())
        loaded = GaugeMetricFamily("sharpi_model_loaded", "1 for each model that is loaded", labels=["model"])
        for model, _ in found:
            loaded.add_metric([model], 1)
        yield loaded
        for field, (name, text) in _GAUGES.items():
            yield _family(GaugeMetricFamily(f"sharpi_{name}", text, labels=["model"]), field, found)
        for field, (name, text) in _COUNTERS.items():
            yield _family(CounterMetricFamily(f"sharpi_{name}", text, labels=["model"]), field, found)


def _family(family: GaugeMetricFamily | CounterMetricFamily, field: str,
            found: Iterable[tuple[str, dict[str, Any]]]) -> Metric:
    for model, counts in found:
        if field in counts:
            family.add_metric([model], float(counts[field]))
    return family
