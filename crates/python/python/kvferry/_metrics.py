"""What engines count."""

from __future__ import annotations

from . import _kvferry


def record_metrics() -> None:
    """Has engines that start from now on count and measure: requests, bytes by route and reason, times, slots that are not quiet.

    Of no effect the second time. A process that is forked off has to ask again.
    """
    _kvferry.metrics_record()


def metrics() -> str:
    """What was counted, over all engines of this process, as Prometheus text (format 0.0.4). The names and units are those of the
    Rust library's ``kvferry::telemetry``.

    To serve it, answer ``GET /metrics`` with it; to merge it with a program's own, read it by
    ``prometheus_client.parser.text_string_to_metric_families``. Raises ``RuntimeError`` before :func:`record_metrics`.
    """
    text = _kvferry.metrics_text()
    if text is None:
        raise RuntimeError("nothing is recorded: call kvferry.record_metrics() before engines start")
    return text
