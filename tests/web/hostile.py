"""Files that lie about what they are or how large they are, each as bytes; and pictures that are what they say."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image

SIDE = 50_000


def picture(side: int = 64, kind: str = "PNG", seed: int = 0, **options: object) -> bytes:
    """A picture that any decoder takes: soft colours and a square in the middle."""
    pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC)
    image.paste((250, 30, 30), (side // 4, side // 4, side // 2, side // 2))
    return encoded(image, kind, **options)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(header: bytes, *chunks: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IEND", b"")


def zeros(count: int, block: int = 2**20) -> bytes:
    """A whole zlib stream of so many zeros, without so many being made."""
    squeezed = zlib.compressobj(9, zlib.DEFLATED, -15)
    one = squeezed.compress(bytes(block)) + squeezed.flush(zlib.Z_FULL_FLUSH)
    last = zlib.compressobj(9, zlib.DEFLATED, -15)
    rest = last.compress(bytes(count % block)) + last.flush()
    total = 1
    for _ in range(count // block):
        total = zlib.adler32(bytes(block), total)
    total = zlib.adler32(bytes(count % block), total)
    return b"\x78\x9c" + one * (count // block) + rest + struct.pack(">I", total)


def flat(side: int) -> bytes:
    """A whole png of one bit a pixel, all black: a thousandth of its pixels in bytes."""
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return png(header, chunk(b"IDAT", zeros(side * (side // 8 + (side % 8 > 0) + 1))))


def bombs() -> dict[str, bytes]:
    """Small files that would be huge in memory, or say so."""
    colours = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    short = chunk(b"IDAT", zlib.compress(bytes(1000)))
    gif = b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\x80\x00\x00" + b"\x00\x00\x00\xff\xff\xff"
    frame = b"," + struct.pack("<HHHH", 0, 0, 65535, 65535) + b"\x00\x02\x02\x44\x01\x00"
    bitmap = b"BM" + struct.pack("<IHHI", 100, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, SIDE, SIDE, 1, 24, *[0] * 6)
    tiff = (
        b"II*\x00"
        + struct.pack("<IH", 8, 4)
        + b"".join(
            struct.pack("<HHII", tag, 4, 1, value) for tag, value in ((256, SIDE), (257, SIDE), (273, 8), (279, 10))
        )
    )
    return {
        "a whole png of 50,000 x 50,000": flat(SIDE),
        "a png that says 50,000 x 50,000": png(colours, short),
        "a png of 12,000 x 12,000": flat(12_000),
        "a png of 9,000 x 9,000": flat(9000),
        "a png that says 2^31 x 2^31": png(struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0), short),
        "a gif of 65,535 x 65,535": gif + frame + b";",
        "a gif of a thousand such frames": gif + frame * 1000 + b";",
        "a ppm of 50,000 x 50,000": b"P6 50000 50000 255\n" + bytes(100),
        "a bmp of 50,000 x 50,000": bitmap + bytes(46),
        "a tiff of 50,000 x 50,000": tiff + bytes(64),
    }


def repeating(side: int, times: int) -> bytes:
    """A progressive JPEG whose last scan, of 14 bytes, comes again and again: each goes over all pixels."""
    whole = encoded(Image.new("L", (side, side), 127), "JPEG", progressive=True)
    scan, end = whole[whole.rindex(b"\xff\xda") : -2], whole[-2:]
    return whole[:-2] + times * scan + end


def unfolding() -> bytes:
    """A small picture with a comment of 256 MB in 256 kB."""
    header = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    return png(header, chunk(b"zTXt", b"Comment\x00\x00" + zeros(2**28)), chunk(b"IDAT", zlib.compress(bytes(8 * 25))))


def strangers() -> dict[str, bytes]:
    """What is no picture, or only begins like one, or is cut off."""
    whole = {kind: picture(kind=kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")}
    cut = {f"half a {kind}": data[: len(data) // 2] for kind, data in whole.items() if kind not in ("BMP", "PPM")}
    return cut | {
        "nothing": b"",
        "one byte": b"\x00",
        "words": b"not a picture",
        "zeros": bytes(5000),
        "html that begins like a jpeg": b"\xff\xd8\xff\xe0\x00\x10JFIF\x00<html><script>alert(1)</script></html>",
        "javascript that begins like a gif": b"GIF89a/*" + bytes(20) + b"*/=1;alert(1)//",
        "an svg": b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)' width='9' height='9'></svg>",
        "an svg that reads a file": b"<!DOCTYPE s [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><svg>&x;</svg>",
        "an eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%id) (r) file\n",
        "a pdf": b"%PDF-1.7\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF",
        "a zip": b"PK\x03\x04" + bytes(100),
        "a path": b"/etc/passwd",
        "an address": b"http://169.254.169.254/latest/meta-data/",
        "a pickle": b"cos\nsystem\n(S'true'\ntR.",
        "an ico": encoded(Image.new("RGB", (16, 16)), "ICO"),
        "a psd": b"8BPS\x00\x01" + bytes(60),
        "a png of no pixels": png(struct.pack(">IIBBBBB", 0, 0, 8, 2, 0, 0, 0), chunk(b"IDAT", b"")),
    }


def polyglot() -> bytes:
    """A gif of one frame that is also a script: a picture to a decoder, whatever else it is to others."""
    data = encoded(Image.new("P", (0x2A2F, 1)), "GIF")  # its width reads '/*'
    return data + b"*/=1;alert(document.domain)//"
