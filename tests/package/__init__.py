"""precast as users install it: the wheel and the source distribution in empty environments."""
