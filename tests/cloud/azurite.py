"""Azurite, Microsoft's emulator of Azure's storage, on a free port of 127.0.0.1; it keeps its blobs in memory.

`AZURITE` names its command `azurite-blob`, if that is not on PATH: `npm install --prefix FOLDER azurite@3.37.0` puts it
into FOLDER/node_modules/.bin.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field

from cloud.server import END_SECONDS, end_server

#: The account of every Azurite, and its published key.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_VERSION = "2021-08-06"
_SECONDS = 60.0
#: It ends with this process at the latest.
_CODE = """
process.stdin.on("end", () => process.exit()).resume();
process.argv = ["node", "azurite", "--inMemoryPersistence", "--silent", "--blobHost=127.0.0.1", "--blobPort=0"];
require(process.env.AZURITE_SCRIPT);
"""


@dataclass
class Azurite:
    """A running server."""

    process: subprocess.Popen[str] = field(repr=False)
    port: int

    def make_container(self, name: str) -> None:
        """Create a container, by a request signed as Azure has it; obstore has none for that."""
        date = email.utils.formatdate(usegmt=True)
        lines = ["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{_VERSION}", f"/{ACCOUNT}/{ACCOUNT}/{name}"]
        text = "\n".join([*lines, "restype:container"]).encode()
        signature = base64.b64encode(hmac.new(base64.b64decode(KEY), text, hashlib.sha256).digest()).decode()
        headers = {
            "x-ms-date": date,
            "x-ms-version": _VERSION,
            "Authorization": f"SharedKey {ACCOUNT}:{signature}",
            "Content-Length": "0",
        }
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=_SECONDS)) as connection:
            connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
            answer = connection.getresponse()
            if answer.status != 201:
                raise RuntimeError(f"the container was not created: {answer.status}: {answer.read()!r}")

    def close(self) -> None:
        """End the process."""
        end_server(self.process)


def start_azurite() -> Azurite | None:
    """Start a server, empty; None if Azurite or node is not here."""
    command, node = shutil.which(os.environ.get("AZURITE", "azurite-blob")), shutil.which("node")
    if command is None or node is None:
        return None
    process = subprocess.Popen(
        [node, "-e", _CODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "AZURITE_SCRIPT": os.path.realpath(command)},
    )
    assert process.stdout
    for line in process.stdout:
        port = re.search(r"successfully listens on http://127\.0\.0\.1:(\d+)", line)
        if port is not None:
            return Azurite(process, int(port[1]))
    raise RuntimeError(f"Azurite did not start: exit code {process.wait(END_SECONDS)}")
