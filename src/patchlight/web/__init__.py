"""The page and the API beneath it: `patchlight serve`, and `pl.show` in a notebook. Needs the extra `web`."""
