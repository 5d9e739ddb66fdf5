"""Mutates valid messages and opens them as their receivers do; prints crashes, peak memory and worst decode time.

python scripts/fuzz_codec.py --mutations 1000000 --seed 1
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "wire"))


def main() -> int:
    """Run the fuzzer; return 1 if anything but a refusal was raised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=1_000_000, help="how many messages (1000000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (0)")
    arguments = parser.parse_args()

    import gymnasium  # noqa: F401  (the first decoded space or tensor imports it, which is not the decoder's time)
    import torch  # noqa: F401
    from codec_fuzz import fuzz

    rss_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.perf_counter()
    report = fuzz(arguments.mutations, random.Random(arguments.seed))
    seconds = time.perf_counter() - start
    rss_after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"seed {arguments.seed}: {report.num_mutations} mutations in {seconds:.0f} s: "
        f"{report.num_refused} refused, {report.num_decoded} decoded, {len(report.crashes)} crashes; "
        f"worst decode {report.worst_ms:.1f} ms; peak RSS {rss_before:.0f} -> {rss_after:.0f} MiB"
    )
    print("refused by reason:", dict(report.reasons.most_common()))
    for crash in report.crashes[:20]:
        print("crash:", crash)
    return 1 if report.crashes else 0


if __name__ == "__main__":
    sys.exit(main())
