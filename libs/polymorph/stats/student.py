"""Two-sided 97.5 % quantiles of Student's t, without scipy."""

import math

# Exact to four digits for few degrees of freedom, where the expansion below is poor.
_EXACT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
_Z = 1.959963984540054


def t975(degrees: int) -> float:
    """The 97.5 % quantile of Student's t with `degrees` degrees of freedom.

    Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5) beyond ten degrees; its error there is below 1e-4.

    Raises:
        ValueError: `degrees` is below 1.
    """
    if degrees < 1:
        raise ValueError(f"{degrees} degrees of freedom: an interval needs at least 2 independent values")
    if degrees <= len(_EXACT):
        return _EXACT[degrees - 1]
    z, n = _Z, float(degrees)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / n ** (power + 1) for power, term in enumerate(terms))
