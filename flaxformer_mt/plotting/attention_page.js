"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };

  // Colors. A stored byte q is the weight (q / 255)^2, and indexes the palette.
  const palettes = { light: bytes(data.palettes.light), dark: bytes(data.palettes.dark) };
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const theme = () =>
    document.documentElement.dataset.theme || (prefersDark.matches ? "dark" : "light");
  const weight = (q) => (q / 255) ** 2;
  const shown = (q) => weight(q).toFixed(2);
  const rgb = (q) => Array.from(palettes[theme()].subarray(3 * q, 3 * q + 3));
  const color = (q) => `rgb(${rgb(q).join(" ")})`;
  const luminance = (channels) => {
    const [r, g, b] = channels.map((c) =>
      c <= 10 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  // Black or white, whichever has the higher contrast: at least 4.58.
  const ink = (q) => (luminance(rgb(q)) > 0.179 ? "#000" : "#fff");

  for (const kind of data.kinds) kind.bytes = bytes(kind.weights);
  const byName = Object.fromEntries(data.kinds.map((kind) => [kind.name, kind]));
  // What is shown. `selected` is {side: "rows" or "columns", index}, or null.
  const state = { kind: null, layer: 0, head: 0, selected: null, preview: null };

  const size = (kind) => [kind.rows.tokens.length, kind.columns.tokens.length];
  const mapOf = (kind, layer, head) => {
    const [t, s] = size(kind);
    const start = (layer * kind.heads + head) * t * s;
    return kind.bytes.subarray(start, start + t * s);
  };
  const current = () => mapOf(state.kind, state.layer, state.head);
  const meanEntropy = (kind, layer, head) => {
    const rows = kind.entropies[layer][head];
    return rows.reduce((sum, each) => sum + each, 0) / rows.length;
  };

  // Sentences.
  const special = /^(<.*>|>>.*<<|\[.*\]|__\w+__)$/;
  const isolated = (token) => make("bdi", { textContent: token.text });
  const elements = { rows: [], columns: [] };

  function showSentence(side) {
    const { name, role, tokens, rtl } = state.kind[side];
    $(`${side}-name`).textContent = name;
    $(`${side}-role`).textContent = role;
    const parent = $(side);
    parent.parentElement.dir = rtl ? "rtl" : "ltr";
    elements[side] = tokens.map((token, index) => {
      const button = make("button",
        { type: "button", textContent: token.text, tabIndex: -1, dir: "auto" });
      button.className = "token" + (tokens[index + 1]?.starts ? " ends" : "") +
        (special.test(token.text) ? " special" : "");
      button.addEventListener("focus", () => select(side, index));
      button.addEventListener("click", () => select(side, index));
      button.addEventListener("pointerenter", (event) =>
        event.pointerType === "mouse" && preview({ side, index }));
      button.addEventListener("pointerleave", () => preview(null));
      return button;
    });
    // Text may break where a word starts.
    parent.replaceChildren(...elements[side].flatMap((button, index) =>
      tokens[index].starts ? [make("wbr"), button] : [button]));
  }

  function moveInside(buttons, event, columns = 0, rtl = false) {
    const here = buttons.indexOf(document.activeElement);
    const forward = rtl ? -1 : 1;
    const steps = { ArrowRight: forward, ArrowLeft: -forward, Home: -here,
      End: buttons.length - 1 - here, ArrowDown: columns || 1, ArrowUp: -(columns || 1) };
    if (here < 0 || !(event.key in steps)) return;
    event.preventDefault();
    const next = here + steps[event.key];
    if (next >= 0 && next < buttons.length) buttons[next].focus();
  }

  function select(side, index) {
    state.selected = side === null ? null : { side, index };
    state.preview = null;
    showSelection();
    if (state.selected) reveal(state.selected);
  }

  function preview(token) {
    state.preview = token;
    showSelection();
  }

  // The weights between a token and those of the other side: [index there, byte].
  function weightsOf({ side, index }) {
    const [t, s] = size(state.kind);
    const map = current();
    return side === "rows"
      ? Array.from({ length: s }, (_, column) => map[index * s + column])
      : Array.from({ length: t }, (_, row) => map[row * s + index]);
  }

  function showSelection() {
    const chosen = state.preview || state.selected;
    for (const side of ["rows", "columns"]) {
      const focusable = state.selected?.side === side ? state.selected.index : 0;
      elements[side].forEach((button, index) => {
        button.tabIndex = index === focusable ? 0 : -1;
        button.classList.toggle("chosen", chosen?.side === side && chosen.index === index);
        button.setAttribute("aria-pressed",
          String(state.selected?.side === side && state.selected.index === index));
        button.classList.remove("most");
        button.style.backgroundColor = button.style.color = "";
      });
    }
    if (chosen) {
      const other = chosen.side === "rows" ? "columns" : "rows";
      weightsOf(chosen).forEach((q, index) => {
        elements[other][index].style.backgroundColor = color(q);
        elements[other][index].style.color = ink(q);
      });
      if (other === "columns") elements.columns[alignment()[chosen.index]].classList.add("most");
    }
    showReadout(chosen);
    showCursor(chosen);
  }

  const alignment = () => state.kind.alignment[state.layer][state.head];

  function showReadout(chosen) {
    if (!chosen) {
      $("readout").replaceChildren(
        "Point at a token, tap it or move to it with the keys to see what it attends to.");
      return;
    }
    const { side, index } = chosen;
    const others = state.kind[side === "rows" ? "columns" : "rows"].tokens;
    const found = weightsOf(chosen).map((q, position) => ({ q, position }))
      .filter(({ q }) => weight(q) >= 0.005).sort((a, b) => b.q - a.q);
    const parts = [make("b", {}, isolated(state.kind[side].tokens[index])),
      side === "rows" ? " attends to " : " is attended to by "];
    found.slice(0, 6).forEach(({ q, position }, rank) => {
      parts.push(rank ? ", " : "", isolated(others[position]), ` ${shown(q)}`);
    });
    if (!found.length) parts.push("no token");
    if (found.length > 6) parts.push(` and ${found.length - 6} more`);
    if (side === "rows") {
      const bits = state.kind.entropies[state.layer][state.head][index];
      parts.push(make("span", { className: "quiet", textContent: ` (${bits.toFixed(2)} bits)` }));
    }
    $("readout").replaceChildren(...parts);
  }

  // Small multiples.
  const narrow = matchMedia("(max-width: 30rem)");
  let buttons = [];

  function paint(canvas, map, [t, s]) {
    canvas.width = s;
    canvas.height = t;
    const image = new ImageData(s, t);
    const palette = palettes[theme()];
    map.forEach((q, i) => {
      image.data.set(palette.subarray(3 * q, 3 * q + 3), 4 * i);
      image.data[4 * i + 3] = 255;
    });
    canvas.getContext("2d").putImageData(image, 0, 0);
  }

  // Thumbnails of long sentences show the greatest weight of each square of cells.
  function pooled(map, [t, s], most = 64) {
    const side = Math.ceil(Math.max(t, s) / most);
    const shape = [Math.ceil(t / side), Math.ceil(s / side)];
    if (side === 1) return [map, shape];
    const found = new Uint8Array(shape[0] * shape[1]);
    map.forEach((q, i) => {
      const place = Math.floor(i / s / side) * shape[1] + Math.floor(i % s / side);
      found[place] = Math.max(found[place], q);
    });
    return [found, shape];
  }

  const columnsOfHeads = (kind) =>
    kind.heads > 8 && (narrow.matches || kind.heads > 16) ? 8 : kind.heads;

  function showHeads() {
    const { kind } = state;
    const columns = columnsOfHeads(kind);
    const label = (text) => make("div", { className: "label", textContent: text });
    const cells = [label("")];
    for (let head = 0; head < columns; head++) cells.push(label(head));
    buttons = [];
    for (let layer = 0; layer < kind.layers; layer++) {
      for (let head = 0; head < kind.heads; head++) {
        if (head % columns === 0) cells.push(label(head ? "" : layer));
        const bits = meanEntropy(kind, layer, head).toFixed(1);
        const canvas = make("canvas");
        const button = make("button", { type: "button", className: "head", tabIndex: -1 },
          canvas, make("span", { textContent: bits }));
        button.setAttribute("aria-label", `Layer ${layer}, head ${head}, ${bits} bits`);
        const choose = () => {
          state.layer = layer;
          state.head = head;
          showHead();
        };
        button.addEventListener("focus", choose);
        button.addEventListener("click", choose);
        paint(canvas, ...pooled(mapOf(kind, layer, head), size(kind)));
        buttons.push(button);
        cells.push(button);
      }
      for (let rest = kind.heads % columns; rest % columns; rest++) cells.push(label(""));
    }
    $("heads").style.setProperty("--columns", columns);
    $("heads").replaceChildren(...cells);
  }

  // One head in large.
  const matrix = $("matrix");

  function showHead() {
    const { kind, layer, head } = state;
    buttons.forEach((button, index) => {
      const pressed = index === layer * kind.heads + head;
      button.setAttribute("aria-pressed", String(pressed));
      button.tabIndex = pressed ? 0 : -1;
    });
    const [t, s] = size(kind);
    $("head-name").textContent = `Layer ${layer}, head ${head}`;
    $("head-entropy").textContent = `${meanEntropy(kind, layer, head).toFixed(2)} bits ` +
      `on average, of ${Math.log2(s).toFixed(2)} if even over ${s} tokens`;
    paint(matrix.querySelector("canvas"), current(), [t, s]);
    const marks = matrix.querySelector("g");
    const dots = alignment().map((column, row) => {
      const dot = document.createElementNS(marks.namespaceURI, "circle");
      const place = { cx: column + 0.5, cy: row + 0.5, r: 0.1 };
      for (const [name, value] of Object.entries(place)) dot.setAttribute(name, value);
      dot.setAttribute("fill", ink(current()[row * s + column]));
      return dot;
    });
    marks.replaceChildren(...dots);
    $("pairs").replaceChildren(...alignment().map((column, row) => {
      const arrow = make("span", { className: "quiet", textContent: " \u2192 " });
      arrow.setAttribute("aria-label", " to ");
      return make("li", {}, isolated(kind.rows.tokens[row]), arrow,
        isolated(kind.columns.tokens[column]), ` ${shown(current()[row * s + column])}`);
    }));
    showSelection();
  }

  function buildMatrix() {
    const [t, s] = size(state.kind);
    const labels = (side) => make("div", { className: side },
      ...state.kind[side].tokens.map((token) => make("div", {}, isolated(token))));
    const cells = make("div", { className: "cells" });
    cells.innerHTML = `<canvas></canvas><i></i><svg viewBox="0 0 ${s} ${t}"><g></g>` +
      `<rect hidden></rect></svg>`;
    const at = (event) => {
      const box = cells.getBoundingClientRect();
      const column = Math.floor((event.clientX - box.left) / box.width * s);
      const row = Math.floor((event.clientY - box.top) / box.height * t);
      return { row: Math.min(Math.max(row, 0), t - 1), column: Math.min(Math.max(column, 0), s - 1) };
    };
    cells.addEventListener("pointermove", (event) =>
      event.pointerType === "mouse" && preview({ side: "rows", index: at(event).row }));
    cells.addEventListener("pointerleave", () => preview(null));
    cells.addEventListener("click", (event) => select("rows", at(event).row));
    const plane = make("div", { className: "plane" },
      make("div", { className: "corner" }), labels("columns"), labels("rows"), cells);
    plane.setAttribute("aria-hidden", "true");
    matrix.replaceChildren(plane);
    cells.style.setProperty("--s", s);
    cells.style.setProperty("--t", t);
    fit();
  }

  function fit() {
    const plane = matrix.firstElementChild;
    if (!plane) return;
    const [, s] = size(state.kind);
    const available = matrix.clientWidth - matrix.querySelector(".rows").offsetWidth - 2;
    const cell = Math.max(14, Math.min(38, Math.floor(available / s)));
    plane.style.setProperty("--cell", `${cell}px`);
    plane.classList.toggle("dense", cell < 18);
  }

  function showCursor(chosen) {
    const rect = matrix.querySelector("rect");
    if (!rect) return;
    const [t, s] = size(state.kind);
    rect.toggleAttribute("hidden", !chosen);
    for (const side of ["rows", "columns"]) {
      matrix.querySelectorAll(`.${side} > div`).forEach((label, index) =>
        label.classList.toggle("chosen", chosen?.side === side && chosen.index === index));
    }
    if (!chosen) return;
    const place = chosen.side === "rows"
      ? { x: 0, y: chosen.index, width: s, height: 1 }
      : { x: chosen.index, y: 0, width: 1, height: t };
    for (const [name, value] of Object.entries(place)) rect.setAttribute(name, value);
  }

  // Scrolls the matrix, but not the page, to a row or column.
  function reveal({ side, index }) {
    const cell = parseFloat(matrix.firstElementChild.style.getPropertyValue("--cell"));
    const { offsetWidth, offsetHeight } = matrix.querySelector(".corner");
    const [name, room] = side === "rows"
      ? ["scrollTop", matrix.clientHeight - offsetHeight]
      : ["scrollLeft", matrix.clientWidth - offsetWidth];
    matrix[name] = Math.max(Math.min(matrix[name], index * cell), (index + 1) * cell - room);
  }

  matrix.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: ["rows", -1], ArrowDown: ["rows", 1], ArrowLeft: ["columns", -1],
      ArrowRight: ["columns", 1] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const [side, step] = moves[event.key];
    const count = state.kind[side].tokens.length;
    const from = state.selected?.side === side ? state.selected.index : step > 0 ? -1 : count;
    select(side, Math.min(Math.max(from + step, 0), count - 1));
  });

  // Controls.
  function showKind(name) {
    state.kind = byName[name];
    state.selected = state.preview = null;
    const { layers, heads } = state.kind;
    let best = Infinity;
    for (let layer = 0; layer < layers; layer++) {
      for (let head = 0; head < heads; head++) {
        const bits = meanEntropy(state.kind, layer, head);
        if (bits < best) [best, state.layer, state.head] = [bits, layer, head];
      }
    }
    $("sentences").classList.toggle("long", Math.max(...size(state.kind)) > 40);
    showSentence("columns");
    showSentence("rows");
    state.selected = { side: "rows", index: 0 };
    showHeads();
    buildMatrix();
    showHead();
  }

  function showTheme() {
    const name = theme() === "dark" ? "Light" : "Dark";
    $("theme").textContent = name;
    $("theme").setAttribute("aria-label", `${name} colors`);
    const stops = Array.from({ length: 33 }, (_, i) => color(Math.round(i / 32 * 255)));
    $("scale").style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
    if (!state.kind) return;
    showHeads();
    showHead();
  }

  for (const kind of data.kinds) {
    const input = make("input", { type: "radio", name: "kind", id: `kind-${kind.name}`,
      value: kind.name, disabled: !kind.layers });
    input.addEventListener("change", () => showKind(kind.name));
    $("kinds").append(make("div", {}, input,
      make("label", { htmlFor: input.id, textContent: kind.label })));
  }
  $("ticks").append(...[0, 0.05, 0.25, 0.5, 1].map((each) => {
    const tick = make("span", { textContent: each });
    tick.style.left = `${100 * Math.sqrt(each)}%`;
    return tick;
  }));
  $("note").textContent = data.note;
  $("note").hidden = !data.note;
  $("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
    showTheme();
  });
  prefersDark.addEventListener("change", showTheme);
  narrow.addEventListener("change", () => { showHeads(); showHead(); });
  for (const side of ["rows", "columns"]) {
    $(side).addEventListener("keydown", (event) =>
      moveInside(elements[side], event, 0, state.kind[side].rtl));
  }
  $("heads").addEventListener("keydown", (event) =>
    moveInside(buttons, event, state.kind.heads));
  document.addEventListener("keydown", (event) => event.key === "Escape" && select(null));
  new ResizeObserver(fit).observe(matrix);

  const first = data.kinds.findLast((kind) => kind.layers);
  $(`kind-${first.name}`).checked = true;
  showTheme();
  showKind(first.name);
})();
