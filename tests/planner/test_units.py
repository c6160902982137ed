"""Bandwidths and latencies as people write them."""

import pytest

from lightning_compress.planner import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10gbit", 1.25e9),
        ("100mbit", 12.5e6),
        ("100 Mbit/s", 12.5e6),
        ("2.5Gb/s", 312.5e6),
        ("25gbps", 3.125e9),
        ("1.2GB/s", 1.2e9),
        ("800kbit", 1e5),
    ],
)
def test_bandwidth(text: str, expected: float) -> None:
    assert units.bandwidth(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["10", "10g", "gbit", "0gbit", "-1gbit", "nangbit", "10 parsec", "", 10e9, 10])
def test_a_bandwidth_needs_number_and_unit(text: object) -> None:
    with pytest.raises(ValueError, match="write 10gbit"):
        units.bandwidth(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "expected"), [("100us", 1e-4), ("0.5 ms", 5e-4), ("1s", 1.0), ("50µs", 5e-5)])
def test_duration(text: str, expected: float) -> None:
    assert units.duration(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["100", "-1ms", "nans", "", 1e-4])
def test_a_latency_needs_a_unit(text: object) -> None:
    with pytest.raises(ValueError, match="write 100us"):
        units.duration(text)  # type: ignore[arg-type]
