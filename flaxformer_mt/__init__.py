"""Machine translation with encoder-decoder Transformers in JAX.

    import flaxformer_mt as fmt

    run = fmt.train("configs/quickstart.py", "runs/quickstart")  # Or fmt.Run of a folder.
    run.plot().save("curves.png")
    run.translator().translate("three small dogs")
    fmt.load("opus-mt-en-de").translate("A dog runs.")

The public names are imported on first use, so that importing the package is cheap.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
