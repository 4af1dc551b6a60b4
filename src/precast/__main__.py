"""`python -m precast` is `precast`."""

from precast.cli import main

if __name__ == "__main__":
    main()
