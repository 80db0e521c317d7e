"""Pictures, drawn without a display: heat over an image, figures of several methods, and HTML for notebooks."""

from patchlight.core.drawing.heat import overlay as overlay
from patchlight.core.drawing.heat import robust_scale as robust_scale
from patchlight.core.drawing.notebook import figure_html as figure_html
from patchlight.core.drawing.notebook import heat_html as heat_html
from patchlight.core.drawing.notebook import heat_picture as heat_picture
from patchlight.core.drawing.notebook import maps_html as maps_html
from patchlight.core.drawing.notebook import table_html as table_html
from patchlight.core.drawing.pictures import describe_prediction as describe_prediction
from patchlight.core.drawing.pictures import figure_bytes as figure_bytes
from patchlight.core.drawing.pictures import figure_format as figure_format
from patchlight.core.drawing.pictures import figure_picture as figure_picture
from patchlight.core.drawing.pictures import maps_figure as maps_figure
from patchlight.core.drawing.pictures import percent as percent
from patchlight.core.drawing.pictures import photo_figure as photo_figure
from patchlight.core.drawing.pictures import seen_figure as seen_figure
from patchlight.core.drawing.pictures import short as short
