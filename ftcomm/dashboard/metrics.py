"""The metrics of a job, for Prometheus and for OpenTelemetry: one table, from which both are made.

Names are those of Prometheus (https://prometheus.io/docs/practices/naming/): a prefix, base units, `_total` on what
only grows. OpenTelemetry gets the same ones by its own convention: dots, and the unit beside the name.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ftcomm.errors import FtcommError, SettingsError
from ftcomm.monitoring.job import GONE, Overview

STATES = ("starting", "training", "catching up", "away", "finished")  # of replicas


class MetricKind(enum.Enum):
    """Whether a metric only grows."""

    COUNTER = "counter"
    GAUGE = "gauge"


class MetricSample(NamedTuple):
    """A value with its labels."""

    value: float
    labels: Mapping[str, str] = {}


class Metric(NamedTuple):
    """A metric. `name` has its unit and no `_total`."""

    name: str
    kind: MetricKind
    unit: str  # of UCUM, as OpenTelemetry writes it
    help: str
    samples: Callable[[Overview], Iterable[MetricSample]]

    @property
    def otel(self) -> str:
        """`ftcomm.gpu_time` of `ftcomm_gpu_seconds`."""
        name = self.name.removeprefix("ftcomm_").replace("gpu_seconds", "gpu_time").replace("_seconds", "_time")
        return f"ftcomm.{name}"


def _one(value: Callable[[Overview], float | None]) -> Callable[[Overview], Iterator[MetricSample]]:
    def samples(job: Overview) -> Iterator[MetricSample]:
        if (number := value(job)) is not None:
            yield MetricSample(number)

    return samples


def _each(
    label: str, values: Callable[[Overview], Mapping[str, float]]
) -> Callable[[Overview], Iterator[MetricSample]]:
    return lambda job: (MetricSample(value, {label: name}) for name, value in values(job).items())


def _states(job: Overview) -> Mapping[str, float]:
    return {state: sum(row.state == state for row in job.rows) for state in STATES}


def _prices(job: Overview) -> Iterator[MetricSample]:
    for cause, phases in job.prices.items():
        for phase, amount in phases.items():
            yield MetricSample(amount, {"cause": cause, "phase": phase})


def _replicas(value: Callable[[Any], float | None]) -> Callable[[Overview], Iterator[MetricSample]]:
    def samples(job: Overview) -> Iterator[MetricSample]:
        for row in job.rows:
            if (number := value(row)) is not None:
                yield MetricSample(number, {"replica": str(row.replica), "host": row.host})

    return samples


COUNTER, GAUGE = MetricKind.COUNTER, MetricKind.GAUGE
METRICS = (
    Metric(
        "ftcomm_job_info",
        GAUGE,
        "1",
        "Always 1; the labels say which job this is.",
        lambda job: [MetricSample(1, {"run": job.run, "script": job.script, "state": job.state})],
    ),
    Metric("ftcomm_epoch", GAUGE, "1", "The number of the newest view.", _one(lambda job: job.epoch)),
    Metric("ftcomm_steps", COUNTER, "{step}", "Training steps that the job has done.", _one(lambda job: job.step + 1)),
    Metric("ftcomm_replicas", GAUGE, "{replica}", "Replicas by what they do.", _each("state", _states)),
    Metric("ftcomm_ranks_per_replica", GAUGE, "{rank}", "Ranks of a replica.", _one(lambda job: job.ranks_per_replica)),
    Metric(
        "ftcomm_effective_training_ratio",
        GAUGE,
        "1",
        "Training over all GPU-seconds since the first view.",
        _one(lambda job: job.effective),
    ),
    Metric("ftcomm_gpu_seconds", COUNTER, "s", "GPU-seconds by use.", _each("use", lambda job: job.uses)),
    Metric(
        "ftcomm_interruptions",
        COUNTER,
        "{interruption}",
        "Interruptions by cause.",
        _each("cause", lambda job: {cause: float(count) for cause, count in job.causes.items()}),
    ),
    Metric(
        "ftcomm_interruption_gpu_seconds",
        COUNTER,
        "s",
        "GPU-seconds that interruptions cost, by cause and phase.",
        _prices,
    ),
    Metric(
        "ftcomm_events",
        COUNTER,
        "{event}",
        "Events of the coordinator and the launcher, by kind.",
        _each("kind", lambda job: {kind: float(count) for kind, count in job.events_of.items()}),
    ),
    Metric(
        "ftcomm_replica_steps",
        COUNTER,
        "{step}",
        "Training steps that a replica has done.",
        _replicas(lambda row: row.step + 1),
    ),
    Metric(
        "ftcomm_replica_contributes",
        GAUGE,
        "1",
        "Whether a replica contributes.",
        _replicas(lambda row: float(row.state == "training")),
    ),
    Metric("ftcomm_replica_starts", COUNTER, "{start}", "Starts of a replica.", _replicas(lambda row: row.starts)),
    Metric(
        "ftcomm_replica_wait_seconds",
        GAUGE,
        "s",
        "The longest wait of a rank of a replica in its op.",
        _replicas(lambda row: max([0, *(wait for wait in row.cells if wait != GONE)]) / 1e3),
    ),
)


class OverviewCollector:
    """A collector of prometheus_client. `look` returns the job as of now."""

    def __init__(self, look: Callable[[], Overview]) -> None:
        self._look = look

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        job = self._look()
        for metric in METRICS:
            samples = list(metric.samples(job))
            names = list(samples[0].labels) if samples else []
            kind = CounterMetricFamily if metric.kind is COUNTER else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=names)
            for sample in samples:
                family.add_metric([sample.labels[name] for name in names], sample.value)
            yield family


def prometheus_text(job: Overview) -> bytes:
    """Returns the metrics as Prometheus reads them. Raises `FtcommError` without prometheus_client."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError:
        raise FtcommError("/metrics needs prometheus_client: pip install 'ftcomm[metrics]'") from None
    registry = CollectorRegistry()
    registry.register(OverviewCollector(lambda: job))
    return generate_latest(registry)


class OtelExport:
    """Sends the metrics to a collector of OpenTelemetry by OTLP over HTTP, in a thread of the SDK."""

    def __init__(self, endpoint: str, look: Callable[[], Overview], every: float, reader: Any = None) -> None:
        """Start. `reader`: one of the SDK in place of the export. Raises `SettingsError` without the SDK."""
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.metrics import CallbackOptions, Observation
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            raise SettingsError(
                f"--otlp needs the SDK of OpenTelemetry ({error}): pip install 'ftcomm[otel]'"
            ) from None
        if reader is None:
            exporter = OTLPMetricExporter(endpoint=endpoint)
            reader = PeriodicExportingMetricReader(exporter, export_interval_millis=every * 1e3)
        resource = Resource.create({"service.name": "ftcomm", "service.instance.id": look().run})
        self._provider = MeterProvider([reader], resource)
        meter = self._provider.get_meter("ftcomm")

        def observe(metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
            return lambda options: [Observation(each.value, dict(each.labels)) for each in metric.samples(look())]

        for metric in METRICS:
            make = meter.create_observable_counter if metric.kind is COUNTER else meter.create_observable_gauge
            make(metric.otel, [observe(metric)], unit=metric.unit, description=metric.help)

    def close(self) -> None:
        """Send the last values and end; blocks for seconds if the collector does not answer."""
        self._provider.shutdown()
