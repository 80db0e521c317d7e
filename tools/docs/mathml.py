"""The LaTeX of formulas as MathML, which browsers draw by themselves: as much of it as docs/formulas.toml uses.

What is not known here is an error, so that no page shows half of a formula.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from typing import NamedTuple

_TOKEN = re.compile(
    r"\\(?:text|mathrm|operatorname\*?)\{[^{}]*\}|\\(?:begin|end)\{[a-z]+\}|\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\S", re.DOTALL
)
_NAMED = re.compile(r"\\(text|mathrm|operatorname\*?)\{(.*)\}", re.DOTALL)

GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "varepsilon": "ε", "eta": "η",
    "theta": "θ", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "pi": "π", "rho": "ρ", "sigma": "σ",
    "tau": "τ", "varphi": "φ", "phi": "ϕ", "psi": "ψ", "omega": "ω",
}  # fmt: skip
UPRIGHT = {"Phi": "Φ", "Omega": "Ω", "Lambda": "Λ", "nabla": "∇", "top": "⊤", "infty": "∞", "varnothing": "∅"}
WORDS = {"log", "exp", "cos", "tanh"}
LIMITS = {"max", "min"}
LARGE = {"sum": "∑", "prod": "∏", "int": "∫"}
BINARY = {"+": "+", "-": "−", "odot": "⊙", "cdot": "⋅", "times": "×", "cup": "∪", "cap": "∩", "setminus": "∖"}
RELATION = {
    "=": "=", "<": "<", ">": ">", "le": "≤", "ge": "≥", "ne": "≠", "in": "∈", "ni": "∋", "sim": "∼", "mid": "|",
    "propto": "∝", "leftarrow": "←", "approx": "≈",
}  # fmt: skip
OPEN = {"(": "(", "[": "[", "{": "{", "lvert": "|", "lVert": "‖", "langle": "⟨", "lfloor": "⌊", "lceil": "⌈"}
CLOSE = {")": ")", "]": "]", "}": "}", "rvert": "|", "rVert": "‖", "rangle": "⟩", "rfloor": "⌋", "rceil": "⌉"}
SPACES = {",": "0.167em", ";": "0.278em", "quad": "1em"}
ACCENTS = {"hat": "^", "tilde": "~", "bar": "‾"}
_THIN = '<mspace width="0.167em"></mspace>'


class Atom(NamedTuple):
    """An element, and what it is to its neighbours: ord, word, large, limits, bin, rel, open, close, punct or space."""

    xml: str
    kind: str = "ord"


class _Reader:
    """The tokens of a formula, read from left to right."""

    def __init__(self, latex: str) -> None:
        self.latex, self.tokens, self.at = latex, _TOKEN.findall(latex), 0

    def wrong(self, what: str) -> ValueError:
        return ValueError(f"{what} in the formula {self.latex!r}; tools/docs/mathml.py says what it knows")

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def next(self) -> str:
        token = self.peek()
        if not token:
            raise self.wrong("something is missing at the end")
        self.at += 1
        return token

    def row(self, *stops: str) -> str:
        """Atoms up to one of the stops, which is left to be read, in an mrow."""
        atoms: list[Atom] = []
        while self.peek() not in stops:
            before = atoms[-1].kind if atoms else "open"
            atom = self.scripts(self.atom(before))
            named = atom.kind in ("word", "limits", "large")
            if (before in ("ord", "close") and named) or (
                before in ("word", "limits") and (named or atom.kind == "ord")
            ):
                atoms.append(Atom(_THIN, "space"))
            atoms.append(atom)
        return "<mrow>" + "".join(atom.xml for atom in atoms) + "</mrow>"

    def group(self) -> str:
        """What stands in braces, or the next atom alone."""
        if self.peek() != "{":
            return self.atom("open").xml
        self.next()
        inside = self.row("}")
        self.next()
        return inside

    def scripts(self, atom: Atom) -> Atom:
        """The atom with what stands below and above it."""
        found: dict[str, str] = {}
        while self.peek() in ("_", "^"):
            place = self.next()
            if place in found:
                raise self.wrong(f"two {place!r} at one symbol")
            found[place] = self.group()
        below, above = found.get("_"), found.get("^")
        if below is None and above is None:
            return atom
        stacked = atom.kind == "limits" or (atom.kind == "large" and "∫" not in atom.xml)
        under, over, both = ("munder", "mover", "munderover") if stacked else ("msub", "msup", "msubsup")
        tag = both if below is not None and above is not None else under if below is not None else over
        return Atom(f"<{tag}>{atom.xml}{below or ''}{above or ''}</{tag}>", atom.kind)

    def atom(self, before: str) -> Atom:
        token = self.next()
        named = _NAMED.fullmatch(token)
        if named is not None:
            return _named(named[1], named[2])
        name = token.removeprefix("\\")
        command = token.startswith("\\")
        if token == "{":
            self.at -= 1
            return Atom(self.group())
        if command and name in "{}":
            return _fence(name)
        if command and name in SPACES:
            return Atom(f'<mspace width="{SPACES[name]}"></mspace>', "space")
        if not command and name in ",;:":
            return Atom(f"<mo>{name}</mo>", "rel" if name == ":" else "punct")
        if name[0].isdigit():
            return Atom(f"<mn>{name}</mn>")
        if command and name in WORDS | LIMITS:
            return Atom(f"<mi>{name}</mi>", "limits" if name in LIMITS else "word")
        if name in BINARY | RELATION:
            return self._operator(name, before)
        if name in OPEN | CLOSE and token != "}":
            return _fence(name)
        return self._letter(name) if not command else self._command(name)

    def _operator(self, name: str, before: str) -> Atom:
        if name in BINARY:
            sign = before in ("open", "rel", "bin", "punct")
            form = 'form="prefix" lspace="0" rspace="0"' if sign else 'form="infix"'
            return Atom(f"<mo {form}>{BINARY[name]}</mo>", "ord" if sign else "bin")
        spaces = ' form="infix" lspace="0.278em" rspace="0.278em" stretchy="false"' if name == "mid" else ""
        return Atom(f"<mo{spaces}>{escape(RELATION[name])}</mo>", "rel")

    def _letter(self, name: str) -> Atom:
        if name == "/":
            return Atom('<mo lspace="0" rspace="0">/</mo>', "bin")
        if not (name.isascii() and name.isalpha()):
            raise self.wrong(f"{name!r}")
        return Atom(f"<mi>{name}</mi>")

    def _command(self, name: str) -> Atom:
        if name in GREEK:
            return Atom(f"<mi>{GREEK[name]}</mi>")
        if name in UPRIGHT:
            return Atom(f'<mi mathvariant="normal">{UPRIGHT[name]}</mi>')
        if name == "partial":
            return Atom("<mi>∂</mi>")
        if name == "dots":
            return Atom("<mi>…</mi>")
        if name in LARGE:
            return Atom(f"<mo>{LARGE[name]}</mo>", "large")
        if name in ACCENTS:
            stretchy = "true" if name == "bar" else "false"
            return Atom(f'<mover accent="true">{self.group()}<mo stretchy="{stretchy}">{ACCENTS[name]}</mo></mover>')
        if name == "frac":
            return Atom(f"<mfrac>{self.group()}{self.group()}</mfrac>")
        if name == "sqrt":
            return Atom(f"<msqrt>{self.group()}</msqrt>")
        if name == "left":
            return self._between()
        if name == "begin{cases}":
            return self._cases()
        raise self.wrong(f"\\{name}")

    def _between(self) -> Atom:
        """What stands between \\left and \\right, whose fences are as high as it is."""
        first = self._stretched(OPEN)
        inside = self.row("\\right", "")
        self.next()
        return Atom(f"<mrow>{first}{inside}{self._stretched(CLOSE)}</mrow>", "close")

    def _stretched(self, fences: Mapping[str, str]) -> str:
        name = self.next().removeprefix("\\")
        if name not in fences:
            raise self.wrong(f"a fence {name!r}")
        form = "prefix" if fences is OPEN else "postfix"
        return f'<mo form="{form}" fence="true" stretchy="true">{fences[name]}</mo>'

    def _cases(self) -> Atom:
        """Lines of two cells behind a brace."""
        lines: list[list[str]] = [[]]
        while True:
            lines[-1].append(self.row("&", "\\\\", "\\end{cases}", ""))
            end = self.next()
            if end == "\\end{cases}":
                break
            if end == "\\\\":
                lines.append([])
        cell = '<mtd style="text-align: left">{}</mtd>'
        rows = "".join("<mtr>" + "".join(map(cell.format, line)) + "</mtr>" for line in lines)
        brace = '<mo form="prefix" fence="true" stretchy="true">{</mo>'
        return Atom(f"<mrow>{brace}<mtable>{rows}</mtable></mrow>")


def _named(kind: str, words: str) -> Atom:
    """Upright words: text, a symbol of several letters, or a function, under whose name its index may stand."""
    if kind == "text":
        return Atom("<mtext>" + escape(words).replace(" ", "\u00a0") + "</mtext>", "space")
    upright = ' mathvariant="normal"' if len(words) == 1 else ""
    return Atom(f"<mi{upright}>{escape(words)}</mi>", {"mathrm": "ord", "operatorname": "word"}.get(kind, "limits"))


def _fence(name: str) -> Atom:
    kind, character = ("open", OPEN[name]) if name in OPEN else ("close", CLOSE[name])
    form = "prefix" if kind == "open" else "postfix"
    return Atom(f'<mo form="{form}" stretchy="false">{character}</mo>', kind)


def mathml(latex: str, block: bool = False) -> str:
    """A formula as a `math` element, in the line or as a block; its LaTeX is what it is called and copied as.

    >>> mathml("a_i")
    '<math alttext="a_i"><mrow><msub><mi>a</mi><mi>i</mi></msub></mrow></math>'
    """
    reader = _Reader(latex)
    inside = reader.row("")
    told = escape(latex)
    if not block:
        return f'<math alttext="{told}">{inside}</math>'
    source = f'<annotation encoding="application/x-tex">{told}</annotation>'
    return f'<math display="block" alttext="{told}"><semantics>{inside}{source}</semantics></math>'
