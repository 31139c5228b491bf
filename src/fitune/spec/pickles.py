"""Files that run code when they are opened: never read, whatever is in them."""

PICKLE_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib")
