"""Debian's nginx and Caddy before a server: under a prefix, with TLS, and set up as the manual tells.

nginx leaves the prefix in paths, and Caddy takes it off.
"""

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.serving import Running
from tests.waiting import eventually

PREFIX = "/ai"
PROXIES = [
    pytest.param(
        name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"needs {name}: apt-get install {package}")
    )
    for name, package in (("nginx", "nginx-light"), ("caddy", "caddy"))
]
_MANUAL = Path(__file__).parents[2] / "docs" / "deploy.md"
_NGINX = """
daemon off;
pid {folder}/pid;
error_log stderr;
user root;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port} ssl;
        ssl_certificate {folder}/cert.pem;
        ssl_certificate_key {folder}/key.pem;
        {manual}
    }}
}}
"""
_CADDY = """
{{
    admin off
    auto_https disable_redirects
    storage file_system {folder}/caddy
}}
{manual}
"""


@contextmanager
def behind(name: str, running: Running, folder: Path) -> Iterator[str]:
    """The address of `running` behind a proxy, whose certificate is `cert.pem` of the `folder`."""
    certify = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    certify += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    certify += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(certify, check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nginx, caddy = (_told(start) for start in ("location /ai/ {", "models.example.org {"))
    template, manual = (_NGINX, nginx) if name == "nginx" else (_CADDY, caddy)
    manual = manual.replace("127.0.0.1:8000", running.base.removeprefix("http://"))
    manual = manual.replace(
        "models.example.org {", f"https://127.0.0.1:{port} {{\ntls {folder}/cert.pem {folder}/key.pem"
    )
    config = folder / "config"
    config.write_text(template.format(folder=folder, port=port, manual=manual), encoding="utf-8")
    run = ["run", "--config", str(config), "--adapter", "caddyfile"] if name == "caddy" else ["-c", str(config)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([name, *run], stdout=log, stderr=log, cwd=folder)
    try:
        eventually(lambda: process.poll() is not None or _listens(port))
        assert process.poll() is None, (folder / "log").read_text(encoding="utf-8")
        yield f"https://127.0.0.1:{port}{PREFIX}"
    finally:
        process.terminate()
        process.wait()


def _told(start: str) -> str:
    """The block of the manual that begins with a line."""
    block = re.search(rf"^```\n({re.escape(start)}.*?)^```", _MANUAL.read_text(encoding="utf-8"), re.M | re.S)
    assert block is not None, start
    return block[1]


def _listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0
