"""The native engine: C++ sources, their compilation, and the library with its functions in Python."""
