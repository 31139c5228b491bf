"""A process for a test: says that it is there, and then sleeps."""

import sys
import time

from fitune.child import requests

if __name__ == "__main__":
    connection, _ = next(requests(sys.argv))
    connection.send_bytes(b"here")
    time.sleep(60)
