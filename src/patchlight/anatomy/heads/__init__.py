"""Heads define the scores that are explained: classes in place of a model's own, and questions about its output."""

from patchlight.anatomy.heads.answer import Answer as Answer
from patchlight.anatomy.heads.boxes import Box as Box
from patchlight.anatomy.heads.boxes import Boxes as Boxes
from patchlight.anatomy.heads.features import Head as Head
from patchlight.anatomy.heads.features import Linear as Linear
from patchlight.anatomy.heads.features import Neurons as Neurons
from patchlight.anatomy.heads.features import Prototypes as Prototypes
from patchlight.anatomy.heads.features import Similar as Similar
from patchlight.anatomy.heads.features import Texts as Texts
from patchlight.anatomy.heads.features import head_of as head_of
from patchlight.anatomy.heads.question import Question as Question
from patchlight.anatomy.heads.regions import Mask as Mask
from patchlight.anatomy.heads.regions import Region as Region
