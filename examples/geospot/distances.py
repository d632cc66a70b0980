"""Great-circle distances and the kernels that turn them into rewards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

EARTH_RADIUS_KM = 6371.0

Position = tuple[float, float]  # latitude, longitude in degrees


def haversine_km(first: Position, second: Position) -> float:
    """Returns the great-circle distance of two positions on a sphere of radius 6,371 km.

    2 R asin sqrt(sin^2(dlat / 2) + cos(lat_1) cos(lat_2) sin^2(dlon / 2))
    """
    latitudes = math.radians(first[0]), math.radians(second[0])
    half_height = (latitudes[1] - latitudes[0]) / 2
    half_width = math.radians(second[1] - first[1]) / 2
    chord = math.sin(half_height) ** 2 + math.cos(latitudes[0]) * math.cos(latitudes[1]) * math.sin(half_width) ** 2
    return 2 * EARTH_RADIUS_KM * math.asin(min(1.0, math.sqrt(chord)))


def kernels(distances_km: Mapping[str, float], taus_km: Mapping[str, float]) -> dict[str, float]:
    """Returns k_f = exp(-d_f / tau_f) for every field with a distance."""
    return {field: math.exp(-distance / taus_km[field]) for field, distance in distances_km.items()}


def fixed_mean(values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Returns sum w_f k_f / sum w_f over all fields with a weight: a field without a kernel counts 0."""
    return sum(weights[field] * values.get(field, 0.0) for field in weights) / sum(weights.values())


def mean_of_given(values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Returns sum w_f k_f / sum w_f over the fields with a kernel, or 0: vlm-gym's reward.

    An answer gains by omitting fields.
    """
    total = sum(weights[field] for field in values)
    return sum(weights[field] * value for field, value in values.items()) / total if total else 0.0


def centre(positions: Iterable[Position]) -> Position:
    """Returns the centre of positions on the sphere: the direction of the sum of their unit vectors."""
    x = y = z = 0.0
    for latitude, longitude in positions:
        phi, lam = math.radians(latitude), math.radians(longitude)
        x += math.cos(phi) * math.cos(lam)
        y += math.cos(phi) * math.sin(lam)
        z += math.sin(phi)
    return math.degrees(math.atan2(z, math.hypot(x, y))), math.degrees(math.atan2(y, x))
