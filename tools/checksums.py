"""`python -m tools.checksums`: the checksums of the bundled model's files."""

from __future__ import annotations

from patchlight.zoo import bundled

if __name__ == "__main__":
    bundled.SUMS.write_text(bundled.checksum_lines(), encoding="utf-8")
    print(f"wrote {bundled.SUMS}")
