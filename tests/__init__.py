"""The tests: a folder for each package of `src/precast`, and folders for what holds between packages."""
