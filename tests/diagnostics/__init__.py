"""What watches a program and says what it saw: a folder for each package of `precast.diagnostics`."""
