"""Cards: what one computes and moves in a second, measured, of a record, or by its data sheet."""

from chronicals.cards.rates import BF16, FP8, FP32, Rates, asked_rates, rates_here, rates_of

__all__ = ["BF16", "FP8", "FP32", "Rates", "asked_rates", "rates_here", "rates_of"]


def __dir__() -> list[str]:
    return sorted(__all__)
