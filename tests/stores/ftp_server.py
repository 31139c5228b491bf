"""A real FTP server in this process, over a folder of the test."""

import contextlib
import threading

USER, PASSWORD = "me", "a-password-of-the-tests"


@contextlib.contextmanager
def running_ftp_server(folder):
    """Its port."""
    from pyftpdlib.authorizers import DummyAuthorizer
    from pyftpdlib.handlers import FTPHandler
    from pyftpdlib.servers import ThreadedFTPServer

    authorizer = DummyAuthorizer()
    authorizer.add_user(USER, PASSWORD, str(folder), perm="elradfmwMT")
    (folder / "read-only").mkdir()
    authorizer.override_perm(USER, str(folder / "read-only"), "elr", recursive=True)

    class Handler(FTPHandler):
        auth_failed_timeout = 0

    Handler.authorizer = authorizer
    server = ThreadedFTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"timeout": 0.1, "handle_exit": False}, daemon=True
    )
    thread.start()
    try:
        yield server.address[1]
    finally:
        server.close_all()
        thread.join(10)
