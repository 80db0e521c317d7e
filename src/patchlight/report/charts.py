"""The charts are in `patchlight.core.drawing.charts`, where `study` may use them too."""

from patchlight.core.drawing.charts import Band as Band
from patchlight.core.drawing.charts import Dot as Dot
from patchlight.core.drawing.charts import Line as Line
from patchlight.core.drawing.charts import dot_chart as dot_chart
from patchlight.core.drawing.charts import line_chart as line_chart
from patchlight.core.drawing.charts import line_style as line_style
from patchlight.core.drawing.charts import rank_chart as rank_chart
