"""An example of mixed precision training, run by `precast demo`. Copy the two training steps of `example.py`."""
