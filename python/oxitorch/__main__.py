import sys

from oxitorch._cli import main

if __name__ == "__main__":
    sys.exit(main())
