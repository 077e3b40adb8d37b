"""From a URL to a reducer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, urlsplit

from neuron_fabric.runtime.reducer.base import Reducer
from neuron_fabric.runtime.reducer.golden import GoldenReducer
from neuron_fabric.runtime.reducer.udp import UdpReducer, resolve

__all__ = ["ENVIRONMENT_VARIABLE", "SCHEMES", "ReducerUrl", "connect"]

ENVIRONMENT_VARIABLE = "NEURON_FABRIC_REDUCER"
"""Its value is the URL where nothing else says one."""


@dataclass(frozen=True)
class ReducerUrl:
    """A URL, taken apart.

    Attributes
    ----------
    scheme : str
        One of :data:`SCHEMES`.
    place : str
        What follows it, without options: ``host:port``, or a name.
    job : int or None
        ``job=``: the number of the first job; the same for all workers of a training run and of no other run.
    slots, lines : int
        ``slots=`` and ``lines=``: chunks in flight and lines of a chunk to ask for.
    timeout : float
        ``timeout=``: seconds that a worker waits for a bucket's result once all have sent theirs.
    open_timeout : float
        ``open_timeout=``: seconds that the first bucket waits for the job to be granted.
    """

    scheme: str
    place: str
    job: int | None = None
    slots: int = 64
    lines: int = 16
    timeout: float = 5.0
    open_timeout: float = 10.0

    @classmethod
    def parse(cls, url: str) -> ReducerUrl:
        """Take a URL apart; ``ValueError`` says what is wrong with it and what there is."""
        scheme = url.partition(":")[0]
        if scheme not in SCHEMES or ":" not in url:
            raise ValueError(f"reducer {url!r}: unknown kind {scheme!r}; there are {', '.join(_FORMS.values())}")
        parts = urlsplit(url)
        options: dict[str, int | float] = {}
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name not in _OPTIONS:
                raise ValueError(f"reducer {url!r}: unknown option {name!r}; there are {', '.join(_OPTIONS)}")
            kind, low, high = _OPTIONS[name]
            try:
                options[name] = number = kind(value)
            except ValueError:
                raise ValueError(f"reducer {url!r}: {name} must be a number, not {value!r}") from None
            if not low <= number <= high:
                raise ValueError(f"reducer {url!r}: {name} must be {low} to {high}, not {value}")
        if options.get("slots", 1) & (options.get("slots", 1) - 1):  # type: ignore[operator]
            raise ValueError(f"reducer {url!r}: slots must be a power of two, not {options['slots']}")
        if scheme == "udp":
            _host_and_port(parts.netloc, url)
        return cls(scheme, parts.netloc or parts.path, **options)  # type: ignore[arg-type]

    def resolved(self) -> ReducerUrl:
        """The same with an address in place of a host's name; :class:`AbsentError` if there is none."""
        if self.scheme != "udp":
            return self
        host, port = _host_and_port(self.place, f"udp://{self.place}")
        address = resolve(host, port)[1][0]
        return replace(self, place=f"[{address}]:{port}" if ":" in address else f"{address}:{port}")


_OPTIONS: dict[str, tuple[Callable[[str], int | float], float, float]] = {
    "job": (int, 0, 0xFFFF),
    "slots": (int, 1, 1 << 16),
    "lines": (int, 1, 255),
    "timeout": (float, 0.01, 3600.0),
    "open_timeout": (float, 0.01, 3600.0),
}


def _host_and_port(netloc: str, url: str) -> tuple[str, int]:
    parts = urlsplit(f"//{netloc}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.username is not None:
        raise ValueError(f"reducer {url!r}: it must be udp://host:port, as udp://127.0.0.1:20045")
    return host, port


def _udp(url: ReducerUrl) -> Reducer:
    return UdpReducer(*_host_and_port(url.place, f"udp://{url.place}"))


def _golden(url: ReducerUrl) -> Reducer:
    return GoldenReducer(url.place)


SCHEMES: dict[str, Callable[[ReducerUrl], Reducer]] = {"udp": _udp, "golden": _golden}
_FORMS = {"udp": "udp://host:port", "golden": "golden:name"}


def connect(url: str | ReducerUrl) -> Reducer:
    """The reducer behind a URL, of which no job is asked for yet.

    ``ValueError`` if the URL is wrong; :class:`AbsentError` if its host is not known. Nothing is sent.
    """
    parsed = url if isinstance(url, ReducerUrl) else ReducerUrl.parse(url)
    return SCHEMES[parsed.scheme](parsed)
