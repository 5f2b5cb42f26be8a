"""Code of the Python models; each `model_repository/<model>/1/model.py` is one import from here."""
