"""`sharpi serve` as replicas of a Ray Serve deployment, which one address serves and whose number follows the load.

    pip install 'sharpi[serve,ray]'
    serve run sharpi.serve.ray_serve:application config=/etc/sharpi/serve.toml min_replicas=1 max_replicas=4

Each replica is the same application as `sharpi serve` and loads its own models. Requests with the same `x-session-id`
header go to the same replica, whose cache has the beginning of their conversation; others are spread. Ray's proxy
decides which address is listened at (`serve start --http-host`), so `host` and `port` of the settings count only for
which names in a Host header are allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from sharpi.errors import InvalidRequestError
from sharpi.serve.app import create_app, server_of
from sharpi.serve.http.state import ApiServer
from sharpi.serve.settings import ServerSettings, read_config

__all__ = ["Replica", "application", "require_well"]

_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_ARGUMENTS = ("config", "min_replicas", "max_replicas", "gpus")


class Replica:
    """What Ray asks of a replica beside the application, which Ray puts into `app`."""

    app: Any

    def check_health(self) -> None:
        """Raises `RuntimeError` if this replica should be replaced."""
        require_well(server_of(self.app))


def require_well(server: ApiServer) -> None:
    """Raises `RuntimeError`, which says why, if a server will answer no more: no step ends, or its model cannot be
    loaded. One that still loads its model is well."""
    stalled = [f"{model} has finished no step for {seconds:.0f} s" for model, seconds in server.watch.stalled()]
    failed = [] if server.store.loaded() or server.store.loading else list(server.store.failures.values())
    if stalled or failed:
        raise RuntimeError("; ".join([*stalled, *failed]))


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """The application that `serve run` deploys.

    config: a settings file, as for `sharpi serve --config`; it must be on every node. min_replicas, max_replicas: how
    many there are, by the number of requests; 1 and 1 without them. gpus: of each replica; without it, 1, or 0 if the
    settings say that models run on the CPU. Raises `InvalidRequestError`.
    """
    unknown = sorted(set(arguments) - set(_ARGUMENTS))
    if unknown:
        raise InvalidRequestError(f"unknown argument {unknown[0]!r}; there are {', '.join(_ARGUMENTS)}")
    settings = ServerSettings(**read_config(arguments["config"])) if "config" in arguments else ServerSettings()
    least, most = _count(arguments, "min_replicas", 1), _count(arguments, "max_replicas", 1)
    if not 1 <= least <= most:
        raise InvalidRequestError(f"min_replicas must be 1 to max_replicas, which is {most}, not {least}")
    gpus = _count(arguments, "gpus", 0 if settings.device == "cpu" else 1)

    def build() -> Any:
        return create_app(settings)

    deployment = serve.deployment(
        serve.ingress(build)(Replica), name="sharpi", ray_actor_options={"num_gpus": gpus},
        # The replica's own queue refuses what is too much, with 429; Ray would let it wait without end.
        max_ongoing_requests=2 * (settings.parallel + settings.max_queue),
        autoscaling_config=AutoscalingConfig(min_replicas=least, max_replicas=most,
                                             target_ongoing_requests=settings.parallel),
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        graceful_shutdown_timeout_s=settings.drain_seconds)
    return deployment.bind()


def _count(arguments: Mapping[str, Any], name: str, otherwise: int) -> int:
    given = arguments.get(name, otherwise)
    try:
        return int(given)
    except (TypeError, ValueError):
        raise InvalidRequestError(f"{name} must be a whole number, not {given!r}") from None
