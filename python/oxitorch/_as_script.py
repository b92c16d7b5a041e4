"""What `oxitorch preflight` runs as the script when it was called from Python: asks that process to run the function.

Prints nothing; the exit status is that of the run.
"""

import os
import socket
import sys


def main(path: str) -> int:
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(path)
        s.sendall(os.environ["OXITORCH_PREFLIGHT"].encode() + b"\n")
        status = s.makefile().readline()
    return int(status) if status else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
