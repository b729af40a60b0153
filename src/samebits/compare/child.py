"""A peer in a process-wide mode: ``python -m samebits.compare.child OUT``, the request as JSON on standard input.

The environment of the mode is the process's own; its switches are set before anything is computed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from samebits.compare import entries
from samebits.compare.request import from_json


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    request = from_json(asked["request"])
    peer = next(peer for peer in request.peers() if peer.name == asked["peer"])
    mode = next(mode for mode in peer.modes if mode.name == asked["mode"])
    try:
        mode.apply()
    except ImportError as error:
        return entries.not_compared(peer, mode, "unavailable", entries.reason(error))
    except Exception as error:
        return entries.not_compared(peer, mode, "failed", entries.reason(error))
    bench = entries.Bench(request)
    entry = bench.entry(peer)
    if entry["status"] == "compared" and request.latency:
        bench.prepare_times()
        entry["latency"] = bench.times([peer])[peer.name]
    return entry | {"name": f"{peer.name}, {mode.name}", "mode": mode.name, "digests": bench.digests()}


def main() -> None:
    found = answer(json.load(sys.stdin))
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
