"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures-data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 700px)");
  const FIRST = 10;  // items shown before "Show more"
  const drawn = new Map();
  let printing = false;

  // Okabe and Ito's palette, which colour-blind readers can tell apart; black and yellow are left out for contrast.
  const colours = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F"];
  const brighter = ["#4AA3DF", "#F08A3C", "#2FC49A", "#E29CC4", "#F2BC4B", "#9AD4F5", "#C9A868", "#B0B0B0"];
  const coloured = (value, isDark) => {  // the same colours, brighter on a dark ground
    if (Array.isArray(value)) return value.map((item) => coloured(item, isDark));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, isDark)]));
    const place = isDark && typeof value === "string" ? colours.indexOf(value) : -1;
    return place < 0 ? value : brighter[place];
  };
  const theme = (isDark) => {
    const text = isDark ? "#e4e7ea" : "#1b1f24", grid = isDark ? "#30363c" : "#e3e6ea", line = isDark ? "#59616a" : "#aab1b9";
    const axis = { gridcolor: grid, linecolor: line, zerolinecolor: line, ticks: "outside", tickcolor: line, automargin: true };
    return { layout: {
      colorway: isDark ? brighter : colours, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: text, size: 13, family: "system-ui, -apple-system, Segoe UI, Roboto, Noto Sans, sans-serif" },
      xaxis: axis, yaxis: axis, hovermode: "closest", legend: { tracegroupgap: 0, font: { size: 12 } },
      hoverlabel: { bgcolor: isDark ? "#2a2f35" : "#ffffff", bordercolor: line, font: { color: text }, align: "left" },
    } };
  };
  const layoutOf = (figure) => {
    const small = narrow.matches && !printing;
    const margin = small ? { l: 48, r: 12, t: 28, b: 48 } : { l: 60, r: 20, t: 28, b: 50 };
    const layout = { height: 380, margin, ...structuredClone(figure.layout), template: theme(dark.matches && !printing) };
    if (small && layout.showlegend !== false) layout.legend = { ...layout.legend, orientation: "h", x: 0, y: 1.02, yanchor: "bottom" };
    if (small) layout.height += 12 * figure.data.filter((trace) => trace.showlegend !== false).length;  // the legend's lines
    return { ...layout, autosize: true };
  };
  const loadPlotly = () => {  // only now: compiling it takes longer than the rest of the page
    if (window.Plotly) return;
    const script = document.createElement("script");
    script.textContent = document.getElementById("plotly").textContent;
    document.head.append(script);
  };
  const draw = (plot) => {
    loadPlotly();
    const figure = figures[Number(plot.id.split("-")[1])];
    drawn.set(plot, figure);
    const name = { format: "png", filename: plot.id, scale: 2 };
    return Plotly.react(plot, coloured(figure.data, dark.matches && !printing), layoutOf(figure), {
      displaylogo: false, responsive: true, toImageButtonOptions: name,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    });
  };
  const redraw = () => drawn.forEach((_, plot) => draw(plot));

  const plots = [...document.querySelectorAll(".plot")];
  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target); }
  }), { rootMargin: "300px" });
  addEventListener("load", () => plots.forEach((plot) => seen.observe(plot)));
  dark.addEventListener("change", redraw);
  narrow.addEventListener("change", redraw);
  addEventListener("beforeprint", () => {
    printing = true;
    document.querySelectorAll("details").forEach((part) => { part.dataset.was = part.open; part.open = true; });
    plots.forEach(draw);
  });
  addEventListener("afterprint", () => {
    printing = false;
    document.querySelectorAll("details").forEach((part) => { part.open = part.dataset.was === "true"; });
    redraw();
  });
  document.querySelectorAll(".png").forEach((button) => button.addEventListener("click", async () => {
    const plot = document.getElementById(button.dataset.plot);
    await draw(plot);
    const ground = getComputedStyle(document.body).backgroundColor;
    await Plotly.relayout(plot, { paper_bgcolor: ground });
    await Plotly.downloadImage(plot, { format: "png", filename: plot.id, scale: 2, width: plot.clientWidth, height: plot.clientHeight });
    await draw(plot);
  }));

  const keyOf = (cell) => {
    const given = cell.dataset.sort;
    const text = given ?? cell.textContent.trim();
    const number = Number(text);
    return text !== "" && !Number.isNaN(number) ? number : text;
  };
  const isEmpty = (cell) => cell.dataset.sort === undefined && ["", "–"].includes(cell.textContent.trim());
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  const sortBy = (heading) => {
    const table = heading.closest("table"), body = table.tBodies[0];
    const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const column = heading.cellIndex;
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [a.cells[column], b.cells[column]];
      if (isEmpty(x) || isEmpty(y)) return isEmpty(x) - isEmpty(y);  // cells without a value stay last
      return sign * compare(keyOf(x), keyOf(y));
    });
    table.querySelectorAll("th").forEach((th) => th.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    body.append(...rows);
  };
  document.querySelectorAll("th .sort").forEach((button) => button.addEventListener("click", () => sortBy(button.closest("th"))));

  const words = (input) => input.value.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (element, wanted) => { const text = element.textContent.toLowerCase(); return wanted.every((word) => text.includes(word)); };
  document.querySelectorAll(".table").forEach((box) => {
    const input = box.querySelector(".filter input");
    input?.addEventListener("input", () => {
      const wanted = words(input), rows = [...box.querySelector("tbody").rows];
      rows.forEach((row) => { row.hidden = !fits(row, wanted); });
      box.querySelector("output").textContent = wanted.length ? `${rows.filter((row) => !row.hidden).length} of ${rows.length}` : "";
    });
  });
  document.querySelectorAll(".side-by-side").forEach((box) => {
    const input = box.querySelector("input"), more = box.querySelector(".more"), items = [...box.querySelectorAll(".item")];
    let limit = FIRST;
    const show = () => {
      const wanted = words(input), fitting = items.filter((item) => fits(item, wanted)), shown = new Set(fitting.slice(0, limit));
      items.forEach((item) => { item.hidden = !shown.has(item); });
      more.hidden = fitting.length <= limit;
      box.querySelector("output").textContent = `${shown.size} of ${fitting.length}`;
    };
    input.addEventListener("input", () => { limit = FIRST; show(); });
    more.addEventListener("click", () => { limit += 5 * FIRST; show(); });
    show();
  });

  const reveal = () => {  // a link into closed details opens them
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let part = target || null; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
    if (target) target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  if (location.hash) reveal();
})();
