"""The rules, one file each: `ampNNN_name.py` defines `RULE`, or several as `RULES`."""
