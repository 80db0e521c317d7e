/* Light or dark, before the first paint: what was chosen here, else what the system prefers. Not a module, so that it blocks. */
(function () {
  var dark = matchMedia("(prefers-color-scheme: dark)");
  function chosen() {
    try { return localStorage.getItem("patchlight-theme"); } catch (e) { return null; }
  }
  function apply() {
    document.documentElement.dataset.theme = chosen() || (dark.matches ? "dark" : "light");
  }
  dark.addEventListener("change", apply);
  apply();
  if (new URLSearchParams(location.search).has("embed")) document.documentElement.classList.add("embed");
})();
