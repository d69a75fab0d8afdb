"use strict";
(() => {
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const themes = ["automatic", "light", "dark"];
  let chosen = 0;
  theme.hidden = false;
  theme.addEventListener("click", () => {
    chosen = (chosen + 1) % themes.length;
    if (chosen) root.dataset.theme = themes[chosen];
    else delete root.dataset.theme;
    theme.textContent = `Theme: ${themes[chosen]}`;
  });

  const rows = [...document.querySelectorAll("#node-table tbody tr")];
  const words = document.getElementById("words");
  const only = document.getElementById("only");
  const filter = () => {
    const wanted = words.value.trim().toLowerCase();
    let shown = 0;
    for (const row of rows) {
      const hit = row.textContent.toLowerCase().includes(wanted);
      row.hidden = !hit || (only.checked && row.dataset.state === "good");
      if (!row.hidden) shown += 1;
    }
    document.getElementById("shown").textContent = `${shown} of ${rows.length} nodes`;
  };
  document.getElementById("filter").hidden = false;
  words.addEventListener("input", filter);
  only.addEventListener("change", filter);
  filter();

  const mesh = document.getElementById("mesh");
  const lines = [...mesh.querySelectorAll("line")];
  for (const link of mesh.querySelectorAll("a")) {
    const name = link.dataset.node;
    const mark = (on) => {
      mesh.classList.toggle("focused", on);
      for (const line of lines) {
        line.classList.toggle("of-node", on && (line.dataset.a === name || line.dataset.b === name));
      }
    };
    for (const event of ["mouseenter", "focus"]) link.addEventListener(event, () => mark(true));
    for (const event of ["mouseleave", "blur"]) link.addEventListener(event, () => mark(false));
  }

  // Paper cannot open what is folded.
  window.addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("details")) folded.open = true;
  });
})();
