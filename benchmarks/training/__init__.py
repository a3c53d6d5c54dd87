"""What `train_bundled_model.py` is made of: text, models by architecture, the optimizer, the file."""
