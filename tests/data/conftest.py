import socket

import pytest


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """Refuse every host but this one, and fail the test that asked for it."""
    asked = []
    resolve, connect = socket.getaddrinfo, socket.socket.connect

    def checked(host):
        if host not in ("127.0.0.1", b"127.0.0.1"):
            asked.append(host)
            raise OSError(f"tests must not reach {host}")

    def local_getaddrinfo(host, *args, **kwargs):
        checked(host)
        return resolve(host, *args, **kwargs)

    def local_connect(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            checked(address[0])
        return connect(self, address)

    monkeypatch.setattr(socket, "getaddrinfo", local_getaddrinfo)
    monkeypatch.setattr(socket.socket, "connect", local_connect)
    yield
    assert not asked, f"the test tried to reach {sorted(set(map(str, asked)))}"
