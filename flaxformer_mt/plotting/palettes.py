"""The color scale of weights, for light and for dark backgrounds.

A straight line in OKLab (Ottosson 2020): equal distances on the scale look equally different.
"""

import numpy as np

ENDS = {"light": ("#f6f4ef", "#152c78"), "dark": ("#1c2129", "#a8caff")}
"""The colors of the weights 0 and 1 on each background."""
LARGEST_ERROR = 0.004
"""How far a weight may be from the one that its byte stands for."""

_TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def palette(background: str, size: int = 256) -> np.ndarray:
    """Returns the scale of a background, "light" or "dark": sRGB, uint8 [size, 3]."""
    ends = np.array([list(bytes.fromhex(color[1:])) for color in ENDS[background]]) / 255
    first, last = to_oklab(ends)
    steps = first + np.linspace(0, 1, size)[:, None] * (last - first)
    linear = (steps @ np.linalg.inv(_TO_LAB).T) ** 3 @ np.linalg.inv(_TO_LMS).T
    linear = np.clip(linear, 0, 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.rint(255 * encoded).astype(np.uint8)


def quantized(weights: np.ndarray) -> np.ndarray:
    """Returns weights as uint8: 255 times their square roots, rounded.

    Small weights keep more digits than large ones: q stands for (q / 255)^2, which is off by at
    most sqrt(weight) / 255 + 1 / 510^2, less than `LARGEST_ERROR`.
    """
    return np.rint(255 * np.sqrt(np.clip(weights, 0, 1))).astype(np.uint8)


def to_oklab(colors: np.ndarray) -> np.ndarray:
    """Converts sRGB from 0 to 1 [..., 3] to OKLab [..., 3], lightness first."""
    linear = np.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)
    return np.cbrt(linear @ _TO_LMS.T) @ _TO_LAB.T
