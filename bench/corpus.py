"""``make corpus``: every network of the corpus, imported, compiled, run on an OpenCL device and verified.

    python -m bench.corpus [--only 'tv_*'] [--jobs 2] [--redo] [--stock-compile] [--table-only]

Each network has a process of its own, with a time and a memory limit. Results are kept as JSON lines, one
for each
network, and a network that has one is not run again; so the command can be stopped and called again. The
table
goes to ``docs/networks.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.table import document, outcome

RESULTS = ROOT / "build" / "corpus.jsonl"
DOCUMENT = ROOT / "docs" / "networks.md"
MANY = 600
"""As many operators a network is taken to have where the list doesn't say."""
PART = "@record "
"""Marks the lines of a network's process that are parts of its record."""

Record = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; returns 1 if a network failed for another reason than TVM's importers."""
    options = _parser().parse_args(arguments)
    if options.one:
        return _child(options.one, options.device, options.part)
    import networks

    entries = networks.corpus()
    if not entries:
        print("the list of networks is not there: ../shared/corpus/networks.toml", file=sys.stderr)
        return 2
    names = [n for n in entries if not options.only or any(fnmatch(n, glob) for glob in options.only)]
    if not names:
        print(f"no network is called like {' or '.join(options.only)}", file=sys.stderr)
        return 2
    records = read(options.results)
    if not options.table_only:
        _run(names, entries, records, options)
    wanted = [records[name] for name in entries if name in records]
    options.document.write_text(document(wanted, len(entries)), encoding="utf-8")
    print(f"{options.document}: {len(wanted)} of {len(entries)} networks")
    return int(any(outcome(records[name])[0] == "failed" for name in names if name in records))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.corpus", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help="networks of these names")
    parser.add_argument("--jobs", type=int, default=1, help="networks at a time")
    parser.add_argument("--redo", action="store_true", help="run again what has a result")
    parser.add_argument("--redo-failed", action="store_true", help="run again what has failed")
    parser.add_argument(
        "--stock-compile", action="store_true", help="compile with stock's texture pipeline too"
    )
    parser.add_argument(
        "--table-only", action="store_true", help="write the table from the results there are"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for each network")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="limit of memory for each network")
    parser.add_argument("--device", default=None, help="OpenCL device, by name or number")
    parser.add_argument("--results", type=Path, default=RESULTS, help=argparse.SUPPRESS)
    parser.add_argument("--document", type=Path, default=DOCUMENT, help=argparse.SUPPRESS)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--part", default="ours", help=argparse.SUPPRESS)
    return parser


def _child(name: str, device: str | None, part: str) -> int:
    """One network in this process; parts of its record go to standard output."""
    import networks

    from bench.one import measure, stock_compile

    def tell(**parts: Any) -> None:
        print(PART + json.dumps(parts), flush=True)

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    entry = networks.corpus()[name]
    if part == "stock":
        stock_compile(entry, tell)
    else:
        measure(entry, tell, device)
    # TVM and OpenCL drivers have been seen to crash while they are taken down.
    sys.stdout.flush()
    os._exit(0)


def _end_with(parent: int) -> None:
    """Ends this process when the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def read(path: Path) -> dict[str, Record]:
    """The last record of each network; a line that was cut short is left out."""
    records: dict[str, Record] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            records[record["name"]] = record
    return records


def _run(
    names: list[str], entries: dict[str, Any], records: dict[str, Record], options: argparse.Namespace
) -> None:
    todo = []
    for name in names:
        known = records.get(name)
        failed = known is not None and outcome(known)[0] == "failed"
        stock = options.stock_compile and known is not None and "stock_seconds" not in known
        if known is None or options.redo or (failed and options.redo_failed) or stock:
            todo.append(name)
    todo.sort(key=lambda name: entries[name].get("relax_calls", MANY))  # small ones first: faults show early
    lock, began = threading.Lock(), time.monotonic()

    def one(name: str) -> Record:
        known = records.get(name)
        only_stock = (
            options.stock_compile and not options.redo and known is not None and "failed" not in known
        )
        record = dict(known) if only_stock and known else network(name, "ours", options)
        if options.stock_compile and "ops" in record:
            record |= {k: v for k, v in network(name, "stock", options).items() if k.startswith("stock_")}
        return record

    with ThreadPoolExecutor(max_workers=options.jobs) as pool:
        running = {pool.submit(one, name): name for name in todo}
        for done, future in enumerate(as_completed(running), 1):
            name, record = running[future], future.result()
            records[name] = record
            options.results.parent.mkdir(parents=True, exist_ok=True)
            with lock, options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            minutes = (time.monotonic() - began) / 60
            print(f"[{done}/{len(todo)}, {minutes:.1f} min] {name}: {' '.join(outcome(record))}", flush=True)


def network(name: str, part: str, options: argparse.Namespace) -> Record:
    """One network (``part``: ``ours`` or ``stock``) in a process of its own; what is known when it ends."""
    command = [sys.executable, "-m", "bench.corpus", "--one", name, "--part", part]
    if options.device is not None:
        command += ["--device", options.device]
    record: Record = {"name": name, "stage": "start"}
    began = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if options.jobs > 1 else dict(os.environ)
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        said: queue.Queue[str] = queue.Queue()
        errors: list[str] = []
        readers = [
            threading.Thread(target=_listen, args=(child.stdout, said.put), daemon=True),
            threading.Thread(target=_listen, args=(child.stderr, errors.append), daemon=True),
        ]
        for reader in readers:
            reader.start()
        stopped, peak = "", 0
        while child.poll() is None:
            peak = max(peak, _resident(child.pid))
            if time.monotonic() - began > options.seconds:
                stopped = f"not done after {options.seconds:.0f} s"
            elif peak > options.gigabytes * 1e9:
                stopped = f"more than {options.gigabytes:g} GB of memory"
            if stopped:
                child.kill()
                break
            time.sleep(0.25)
        child.wait()
        for reader in readers:
            reader.join(timeout=10)
    while not said.empty():
        line = said.get()
        if line.startswith(PART):
            record |= json.loads(line.removeprefix(PART))
    record |= {"seconds": round(time.monotonic() - began, 1), "peak_gigabytes": round(peak / 1e9, 2)}
    if not stopped and child.returncode:
        last = next((text.strip() for text in reversed(errors) if text.strip()), "")
        stopped = f"the process ended with {child.returncode}: {last[:200]}"
    if stopped:
        found = {"stage": record["stage"], "kind": "stopped", "reason": stopped, "known": False}
        record["stock_compile_error" if part == "stock" else "failed"] = stopped if part == "stock" else found
    if part == "stock":
        record["stock_seconds"] = record["seconds"]
    return record


def _listen(stream: Any, take: Any) -> None:
    for line in stream:
        take(line)


def _resident(process: int) -> int:
    """Bytes of memory that a process holds, 0 where the system doesn't say."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
