"""ServeMetrics: counters of a policy server, for Prometheus."""

from __future__ import annotations

from collections import Counter

from rlzmq.telemetry.prometheus import LATENCY_S, Histogram, Labels, Metric, prometheus_text

__all__ = ["ServeMetrics"]

_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class ServeMetrics:
    """Counters of one server. Use them on its event loop.

    Attributes:
        batch_size: Number of rows of each forward pass.
        checkpoint: Name of the served checkpoint.
        num_reloads, num_skipped: How often a newer checkpoint was loaded, and how often one could not be.
    """

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._latency_s: dict[str, Histogram] = {}
        self.batch_size: Histogram = Histogram(_BATCH_SIZES)
        self.checkpoint = ""
        self.num_reloads = 0
        self.num_skipped = 0

    def answered(self, interface: str, code: int, latency_s: float) -> None:
        """Count a request.

        Args:
            interface: "http".
            code: As in HTTP: 200, 400 a malformed request, 404 an unknown module, 503 overloaded, 500 an error.
            latency_s: Time from its arrival to its answer.
        """
        self._requests[interface, code] += 1
        histogram = self._latency_s.get(interface)
        if histogram is None:
            histogram = self._latency_s[interface] = Histogram(LATENCY_S)
        histogram.observe(latency_s)

    def text(self) -> str:
        """Return the metrics in Prometheus's text format."""
        errors: Counter[Labels] = Counter()
        requests: dict[Labels, float | Histogram] = {}
        for (interface, code), number in self._requests.items():
            requests[("interface", interface), ("code", str(code))] = number
            if code != 200:
                errors[(("interface", interface),)] += number
        iteration = int(self.checkpoint) if self.checkpoint.isdecimal() else 0
        latency: dict[Labels, float | Histogram] = {
            (("interface", interface),): histogram for interface, histogram in self._latency_s.items()
        }
        return prometheus_text(
            [
                Metric(
                    "rlzmq_serve_requests_total",
                    "counter",
                    "Answered requests, by interface and HTTP code.",
                    requests,
                ),
                Metric("rlzmq_serve_errors_total", "counter", "Requests answered by an error.", dict(errors)),
                Metric(
                    "rlzmq_serve_latency_seconds",
                    "histogram",
                    "Time from a request's arrival to its answer.",
                    latency,
                ),
                Metric(
                    "rlzmq_serve_batch_size",
                    "histogram",
                    "Observations per forward pass.",
                    {(): self.batch_size},
                ),
                Metric(
                    "rlzmq_serve_checkpoint_info",
                    "gauge",
                    "The checkpoint that is served, as a label.",
                    {(("checkpoint", self.checkpoint),): 1},
                ),
                Metric(
                    "rlzmq_serve_checkpoint_iteration",
                    "gauge",
                    "Training iteration of the checkpoint; 0 if its name has none.",
                    {(): iteration},
                ),
                Metric(
                    "rlzmq_serve_reloads_total",
                    "counter",
                    "Newer checkpoints, by what happened to them.",
                    {(("result", "loaded"),): self.num_reloads, (("result", "skipped"),): self.num_skipped},
                ),
            ]
        )
