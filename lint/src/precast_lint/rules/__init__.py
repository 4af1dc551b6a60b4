"""The rules, one file each: `ampNNN_name.py` holds `RULE` with its cases, or a table of them as `RULES`."""
