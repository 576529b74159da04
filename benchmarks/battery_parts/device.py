"""The device that the battery runs on."""

import importlib.metadata


def describe() -> dict[str, str]:
    """Returns what JAX says of the first device, and the versions of the libraries."""
    import jax

    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "torch", "transformers")}
    return {"device_kind": device.device_kind, "platform": device.platform, **versions}
