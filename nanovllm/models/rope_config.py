"""Read the rotary embedding's base and scaling from config.json, wherever it keeps them."""

import logging
from typing import Any, get_args

from nanovllm.layers.rotary_embedding import RopeScaling, RopeType
from nanovllm.utils.checks import check_bool, check_float, check_int

logger = logging.getLogger(__name__)

_SUPPORTED = ("default", *get_args(RopeType))
_MAX_FACTOR = 1e6  # far above every model
_MAX_THETA = 1e30  # float32 holds it
_PLACES = ("rope_parameters", "rope_scaling")  # transformers 5 and 4


def read_rope(d: dict[str, Any], max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    """Return theta, and the scaling or None; places that contradict each other are an error."""
    groups = {}
    for place in _PLACES:
        if d.get(place) is not None:
            _check_group(place, d[place])
            groups[place] = d[place]
    _refuse_partial_rotation({"the top level": d, **groups})
    theta = _read_theta({"rope_theta": d, **{f"{key}.rope_theta": groups[key] for key in groups}})
    original = d.get("original_max_position_embeddings")
    scalings = {
        place: _read_scaling(place, group, original, max_position_embeddings)
        for place, group in groups.items()
        if set(group) - {"rope_theta", "partial_rotary_factor"}  # theta alone is not a scaling
    }
    if len(set(scalings.values())) > 1:
        raise ValueError(
            f"rope_parameters {d['rope_parameters']!r} and rope_scaling {d['rope_scaling']!r} "
            "differ; remove one of them."
        )
    return theta, next(iter(scalings.values()), None)


def _check_group(place: str, group: Any) -> None:
    if not isinstance(group, dict):
        raise TypeError(f"{place} must be an object, got {group!r}.")
    for key, value in group.items():
        if isinstance(value, dict):
            raise ValueError(
                f"{place} has an object for each type of layer ({key!r}), which is not supported; "
                "all layers must share one."
            )


def _refuse_partial_rotation(groups: dict[str, dict[str, Any]]) -> None:
    for place, group in groups.items():
        factor = group.get("partial_rotary_factor")
        if factor is not None and factor != 1:
            raise ValueError(f"partial_rotary_factor in {place} must be 1, got {factor!r}.")


def _read_theta(groups: dict[str, dict[str, Any]]) -> float:
    thetas = {
        name: check_float(name, group["rope_theta"], above=1, maximum=_MAX_THETA)
        for name, group in groups.items()
        if group.get("rope_theta") is not None
    }
    if not thetas:
        raise ValueError(
            "rope_theta is missing, both at the top level and in rope_parameters; "
            "no default is assumed, since a wrong one gives wrong text."
        )
    if len(set(thetas.values())) > 1:
        listed = " and ".join(f"{name} = {theta:g}" for name, theta in thetas.items())
        raise ValueError(f"{listed} differ; remove the wrong one.")
    return next(iter(thetas.values()))


def _read_scaling(
    place: str, group: dict[str, Any], original: Any, max_position_embeddings: int
) -> RopeScaling | None:
    kinds = {group[key] for key in ("rope_type", "type") if isinstance(group.get(key), str)}
    if len(kinds) != 1:
        raise ValueError(
            f"{place} must have one rope_type (or, legacy, type), one of {', '.join(_SUPPORTED)}; "
            f"got {group!r}."
        )
    kind = kinds.pop()
    if kind not in _SUPPORTED:
        raise ValueError(
            f"{place} has rope_type {kind!r}, which is not supported; supported are "
            f"{', '.join(_SUPPORTED)}."
        )
    reader = _Reader(place, group)
    scaling = None
    if kind == "linear":
        scaling = RopeScaling("linear", reader.factor())
    elif kind == "llama3":
        scaling = _read_llama3(reader, original, max_position_embeddings)
    elif kind == "yarn":
        scaling = _read_yarn(reader, original, max_position_embeddings)
    reader.warn_of_unused(kind)
    return scaling


def _read_llama3(reader: "_Reader", original: Any, max_position_embeddings: int) -> RopeScaling:
    low = reader.number("low_freq_factor", required=True)
    high = reader.number("high_freq_factor", required=True)
    assert low is not None, "required"
    assert high is not None, "required"
    if high <= low:
        raise ValueError(
            f"{reader.place}.high_freq_factor = {high:g} must be above low_freq_factor = {low:g}."
        )
    return RopeScaling(
        "llama3",
        reader.factor(),
        original_max_position_embeddings=reader.original(original, max_position_embeddings),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _read_yarn(reader: "_Reader", original: Any, max_position_embeddings: int) -> RopeScaling:
    original_max = reader.original(original, max_position_embeddings)
    has_factor = reader.group.get("factor") is not None
    # As in transformers: null means "what the two lengths say".
    factor = reader.factor() if has_factor else max_position_embeddings / original_max
    beta_fast = reader.number("beta_fast") or 32.0
    beta_slow = reader.number("beta_slow") or 1.0
    if beta_fast < beta_slow:
        raise ValueError(
            f"{reader.place}.beta_fast = {beta_fast:g} must not be below beta_slow = {beta_slow:g}."
        )
    truncate = reader.take("truncate")
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=original_max,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=reader.number("attention_factor"),
        mscale=reader.number("mscale"),
        mscale_all_dim=reader.number("mscale_all_dim"),
        truncate=True if truncate is None else check_bool(f"{reader.place}.truncate", truncate),
    )


class _Reader:
    """Checked access to one rope object; knows which of its keys were asked for."""

    def __init__(self, place: str, group: dict[str, Any]) -> None:
        self.place = place
        self.group = group
        self._taken = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"}

    def take(self, key: str) -> Any:
        self._taken.add(key)
        return self.group.get(key)

    def number(self, key: str, *, required: bool = False) -> float | None:
        """Return a positive number; None (or 0, which YaRN takes for "not set") unless required."""
        value = self.take(key)
        if value is None and not required:
            return None
        name = f"{self.place}.{key}"
        if required:
            return check_float(name, value, above=0, maximum=_MAX_FACTOR)
        return check_float(name, value, minimum=0, maximum=_MAX_FACTOR)

    def factor(self) -> float:
        return check_float(
            f"{self.place}.factor", self.take("factor"), minimum=1, maximum=_MAX_FACTOR
        )

    def original(self, top_level: Any, max_position_embeddings: int) -> int:
        """The context before scaling; the top level wins, as in transformers."""
        nested = self.take("original_max_position_embeddings")
        name = "original_max_position_embeddings"
        if top_level is not None:
            return check_int(name, top_level, minimum=1, maximum=2**31 - 1)
        if nested is not None:
            return check_int(f"{self.place}.{name}", nested, minimum=1, maximum=2**31 - 1)
        return max_position_embeddings

    def warn_of_unused(self, kind: str) -> None:
        unused = sorted(self.group.keys() - self._taken)
        if unused:
            logger.warning(
                "%s: rope_type %r does not use %s", self.place, kind, ", ".join(map(str, unused))
            )
