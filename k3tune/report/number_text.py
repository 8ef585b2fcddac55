"""Numbers as people read them."""


def figure(value: float | None, unit: str = "") -> str:
    """Three significant digits, with a power of ten where it helps; a dash for None.

    Args:
        value: a finite number, or None.
        unit: ``%`` takes a share of 1, ``bytes`` a size, anything else is put behind the number.
    """
    if value is None:
        return "\N{EN DASH}"
    if unit == "%":
        percent = 100 * value
        return f"{percent:.0f} %" if percent in (0, 100) else f"{percent:.2g} %"
    if unit == "bytes":
        return size(value)
    text = _plain(value)
    return f"{text} {unit}" if unit else text


def size(count: float) -> str:
    """Bytes in decimal units."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6), ("kB", 3)):
        if abs(count) >= 10**power:
            return f"{count / 10**power:.3g} {unit}"
    return f"{count:.0f} B"


def _plain(value: float) -> str:
    if value == 0:
        return "0"
    if float(value).is_integer() and abs(value) < 1e7:
        return f"{int(value):,}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}"
