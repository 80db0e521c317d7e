"""HTML pages that open offline: templates with a common base and style, with pictures inside the file."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Chart:
    """A chart as inline SVG, with a title and a caption."""

    title: str
    svg: str
    caption: str = ""


def render_page(package: str, name: str, **values: Any) -> str:
    """Render a template in the folder `templates` of a package; it may extend `base.html`.

    All text is escaped, and an undefined name is an error.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("patchlight.core.drawing")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(values)


def data_url(picture: Image, kind: str = "jpeg", **options: Any) -> str:
    """A picture as a data URL."""
    out = io.BytesIO()
    picture.save(out, kind, **(options or ({"optimize": True} if kind == "png" else {"quality": 88})))
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"
