"""The compiled engine: its C++ sources, what compiles them, and what finds and loads the library."""
