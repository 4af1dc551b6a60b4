"""The rules, one file each: `ampNNN_name.py` holds `RULE` with its cases. `registry.py` finds them."""
